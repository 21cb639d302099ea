"""The model of the configurations in this folder, named there as ``recipes:minilm``."""

from pathlib import Path

import peft
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

FOLDER = Path(__file__).resolve().parent / "data" / "minilm"
CLASSES = 2


def minilm() -> nn.Module:
    """MiniLM with LoRA of rank 8 on query and value of its last two layers, and a linear head.

    25,346 parameters are trained: 24,576 of the adapter, 770 of the head.
    """
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # It reports a layer of the checkpoint that nothing here uses.
    encoder = transformers.BertModel.from_pretrained(
        FOLDER, local_files_only=True, attn_implementation="eager", add_pooling_layer=False
    )
    adapter = peft.LoraConfig(
        r=8, lora_alpha=16, lora_dropout=0.0, target_modules=["query", "value"], layers_to_transform=[4, 5]
    )
    return Sentences(peft.get_peft_model(encoder, adapter))


class Sentences(nn.Module):
    """Token ids [n, T], -1 for padding, to logits [n, 2] of the mean over a sentence's tokens, normalised.

    The checkpoint was trained to be read by this mean. The head that `transformers` gives a BERT reads the first token,
    in which this checkpoint keeps less.
    """

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(384, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        seen, length = ids >= 0, ids.shape[1]
        # Every position sees itself, so padding has a softmax over something; nothing else looks at padding.
        looks = seen[:, None, :] | torch.eye(length, dtype=torch.bool)
        # An explicit mask, in one shape: transformers drops one that hides nothing, so its time would tell.
        mask = torch.where(looks, 0.0, torch.finfo(torch.float32).min)[:, None]
        hidden = self.encoder(
            input_ids=ids.clamp(min=0),
            attention_mask=mask,
            position_ids=torch.arange(length).expand_as(ids),
            token_type_ids=torch.zeros_like(ids),
        ).last_hidden_state
        mean = (hidden * seen[:, :, None]).sum(1) / seen.sum(1, keepdim=True).clamp(min=1)
        # One norm for every sentence, as large as the head's inputs are many: so the head learns in few steps.
        return self.head(functional.layer_norm(mean, mean.shape[1:]))
