"""Tries every text model of `transformers` that has a head of ours, and writes docs/text-models.md.

    python benchmarks/text_models.py             # all that have no result yet, then the page
    python benchmarks/text_models.py bert gpt2   # these types of models, again
    python benchmarks/text_models.py --table     # the page alone

Each class is built in its smallest configuration, saved with random weights, and put through `raycloak plan`: all of it
trained and, where that is refused, a LoRA adapter on all linear layers. One process runs one plan after another, and
each result is kept at once in benchmarks/results/text-models.jsonl. Delete that file to begin again, as after an update
of `transformers`. It takes about half an hour of processor time.
"""

import argparse
import json
import os
import re
import shutil
import tempfile
import textwrap
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results" / "text-models.jsonl"
PAGE = ROOT / "docs" / "text-models.md"
HEADS = {
    "sequence_classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "token_classification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "causal_lm": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
}
MODES = ("whole", "lora")
VOCABULARY, LENGTH, EXAMPLES = 64, 8, 40

SIZES: dict[str, int] = {
    name: size
    for size, names in {
        64: "vocab_size vocab_size_per_layer_input shape_vocab_size pronunciation_vocab_size entity_vocab_size "
        "max_position_embeddings n_positions n_ctx max_seq_len context_length max_target_positions index_topk "
        "max_source_positions",
        32: "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff d_inner dff hidden_dim ffn_hidden_size "
        "n_inner dim_ff feed_forward_size intermediate_size_mlp dense_intermediate_size mamba_d_ssm sliding_window "
        "sliding_window_size attention_window_size",
        16: "hidden_size d_model n_embd dim emb_dim embedding_size embedding_dim moe_intermediate_size qk_head_dim "
        "shared_expert_intermediate_size shared_intermediate_size shared_experts_intermediate_size "
        "moe_shared_expert_intermediate_size expert_ffn_hidden_size prediction_head_size pooler_hidden_size "
        "word_embed_proj_dim lru_width input_embedding_size output_embedding_size shape_embed_dim "
        "pronunciation_embed_dim attention_hidden_size entity_emb_size num_hash_buckets",
        8: "head_dim attention_head_dim d_head d_kv swa_head_dim kv_channels attention_head_size dim_head "
        "kv_lora_rank q_lora_rank o_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim index_head_dim rotary_dim "
        "linear_key_head_dim linear_value_head_dim linear_head_dim hidden_size_per_layer_input mamba_d_head "
        "mamba_head_dim mamba_headdim mamba_chunk_size chunk_size",
        4: "num_experts n_routed_experts num_local_experts moe_num_experts mamba_d_state mamba_dt_rank state_size "
        "time_step_rank ssm_state_size mamba_n_heads mamba_num_heads",
        2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers num_blocks "
        "num_decoder_layers num_attention_heads n_head n_heads num_heads encoder_attention_heads attention_heads "
        "decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads swa_num_attention_heads "
        "num_key_value_heads num_kv_heads swa_num_key_value_heads linear_num_key_heads linear_num_value_heads "
        "linear_num_heads index_n_heads num_experts_per_tok num_experts_per_token moe_topk moe_k zero_expert_num "
        "moe_top_k",
        1: "n_group topk_group num_mem_blocks mamba_n_groups n_groups mamba_ngroups",
    }.items()
    for name in names.split()
}
"""Small values for the fields that configurations have in common."""

NEEDED = ("head_dim", "num_key_value_heads", "vocab_size")
"""Fields that get a small value even where a configuration leaves them out."""

TOKENS = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "sep_token_id": 3, "cls_token_id": 2}
"""Special tokens where a configuration's own are beyond the vocabulary, or missing."""

OWN: dict[str, dict[str, Any]] = {
    "codegen": {"n_head": 4, "rotary_dim": 4},
    "cohere_compass_text": {
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10_000.0} for kind in ("full_attention", "sliding_attention")
        },
    },
    "deberta": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False},
    "deberta-v2": {
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_biased_input": False,
        "position_buckets": 8,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "layoutlmv3": {"coordinate_size": 3, "shape_size": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lilt": {"hidden_size": 24},
    "longformer": {"attention_window": 4},
    "mamba2": {"num_heads": 4, "head_dim": 8, "n_groups": 1},
    "mistral4": {"head_dim": 16},
    "reformer": {"is_decoder": True, "axial_pos_shape": (8, 8), "axial_pos_embds_dim": (8, 8)},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"]},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "hybrid_layer_ids": [1]},
    "zaya": {"num_experts_per_tok": 1},
}
"""By type of model, fields that it needs, or that the models which people have set."""

BEYOND = re.compile(r"vision|image|audio|speech|codec|vq|backbone|depth|thinker|talker|assistant|esmfold2")
"""Parts of a model that take more than text."""


@dataclass(frozen=True)
class Case:
    """A class, by the first type of model that has it."""

    kind: str
    task: str
    name: str


@dataclass(frozen=True)
class Result(Case):
    """What a plan says of a class.

    Attributes:
        mode: what was trained.
        code: of the refusal; empty if it trains.
    """

    mode: str
    code: str = ""
    message: str = ""
    remedy: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="TYPE", help="types of models to try again")
    parser.add_argument("--table", action="store_true", help="only write the page")
    chosen = parser.parse_args()
    if not chosen.table:
        run(set(chosen.kinds))
    PAGE.write_text(page(results()), encoding="utf-8")


def cases() -> tuple[list[Case], list[Case]]:
    """Return the classes that take text alone, and all others."""
    auto, _ = _auto()
    text, others, met = list[Case](), list[Case](), set[str]()
    for task, table in HEADS.items():
        for kind, name in getattr(auto, table).items():
            if name in met:
                continue
            met.add(name)
            case = Case(kind, task, name)
            (text if _takes_text(kind, name) else others).append(case)
    return text, others


def smallest(kind: type[Any]) -> Any:
    """Return a small configuration of a class, its parts made small, too."""
    import transformers

    usual, own = vars(kind()), OWN.get(kind.model_type, {})
    given: dict[str, Any] = {}
    for name, value in usual.items():
        if isinstance(value, transformers.PreTrainedConfig):
            given[name] = smallest(type(value)).to_dict()
        elif name in SIZES and (type(value) is int or (value is None and name in NEEDED)):
            given[name] = SIZES[name]
    for name, token in TOKENS.items():
        found = usual.get(name)
        if (name in usual or name == "pad_token_id") and not (type(found) is int and 0 <= found < VOCABULARY):
            given[name] = token
    return kind(**{**given, **own})


def run(again: set[str]) -> None:
    """Run all plans that have no result yet, and those of the types in ``again``."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    kept = [result for result in results() if result.kind not in again]
    RESULTS.write_text("".join(_line(result) for result in kept), encoding="utf-8")
    done = {(result.name, result.mode): result for result in kept}
    with tempfile.TemporaryDirectory() as folder:
        write_data(Path(folder))
        for case in cases()[0]:
            if again and case.kind not in again:
                continue
            for mode in MODES:
                result = done.get((case.name, mode))
                if result is None:
                    result = planned(case, mode, Path(folder))
                    print(case.kind, case.task, mode, result.code or "trains", flush=True)
                    with RESULTS.open("a", encoding="utf-8") as file:
                        file.write(_line(result))
                if result.code in ("", "not tried"):
                    break


def planned(case: Case, mode: str, folder: Path) -> Result:
    """Return what a plan says of a class in its smallest configuration."""
    import torch
    import transformers

    from raycloak.coordinator.config.run import parse_config
    from raycloak.coordinator.planning.dry_run import plan_of
    from raycloak.metrics.errors import RaycloakError

    named = asdict(case)
    _, classes = _auto()
    try:
        config = smallest(classes.CONFIG_MAPPING[case.kind])
        config.num_labels = 2
        with torch.random.fork_rng():
            torch.manual_seed(0)
            shutil.rmtree(folder / "net", ignore_errors=True)
            model = getattr(transformers, case.name)(config)
            model.save_pretrained(folder / "net")
            # Sizes that do not fit are this script's fault. That a model needs more than ids, the plan says.
            with suppress(ValueError), torch.no_grad():
                model.eval()(input_ids=torch.full((2, LENGTH), 5))
    except Exception as error:  # noqa: BLE001 - a class of many libraries' may raise anything
        # Needs another library, or an odder configuration than this script makes: for its reader to see.
        said = next(iter(str(error).strip().splitlines()), "")
        return Result(**named, mode=mode, code="not tried", message=f"{type(error).__name__}: {said}")
    data: dict[str, Any] = {"kind": "npz", "path": f"{case.task}.npz", "features": "ids", "labels": "labels"}
    raw = {
        "virtual_workers": 3,
        "steps": 2,
        "expected_batch_size": 12,
        "micro_batch_size": 6,
        "dp_config": {"target_epsilon": 8.0, "target_delta": 1e-5},
        "optimizer": {"name": "sgd", "learning_rate": 0.1},
        "model": {
            "hf": "net",
            "task": case.task,
            **({} if case.task == "causal_lm" else {"classes": 2}),
            **({"lora": {"rank": 2, "target_modules": "all-linear"}} if mode == "lora" else {}),
        },
        "dataset": data,
    }
    try:
        plan_of(parse_config(raw), folder)
    except RaycloakError as error:
        return Result(**named, mode=mode, code=error.code, message=error.message, remedy=error.remedy)
    return Result(**named, mode=mode)


def write_data(folder: Path) -> None:
    """Write a file of ids and labels for each task."""
    import numpy as np

    draw = np.random.default_rng(0)
    ids = draw.integers(4, VOCABULARY, (EXAMPLES, LENGTH))
    # Texts of several lengths.
    ids[np.arange(LENGTH) >= draw.integers(2, LENGTH + 1, EXAMPLES)[:, None]] = -1
    each = {"sequence_classification": np.arange(EXAMPLES) % 2, "causal_lm": np.where(ids < 0, -100, ids)}
    each["token_classification"] = np.where(ids < 0, -100, ids % 2)
    for task, labels in each.items():
        np.savez(folder / f"{task}.npz", ids=ids, labels=labels)


def results() -> list[Result]:
    """Return the results that are kept, in the order of the page."""
    lines = RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.exists() else []
    found = [Result(**json.loads(line)) for line in lines]
    return sorted(found, key=lambda each: (each.kind, list(HEADS).index(each.task), MODES.index(each.mode)))


def page(found: list[Result]) -> str:
    """Return the page: which models train, and of each other one why not and what to do."""
    untried = sorted({each.name for each in found if each.code == "not tried"})
    missing = sorted({case.name for case in cases()[0]} - {each.name for each in found})
    trains = Counter(each.mode for each in found if not each.code)
    tried = len({each.name for each in found}) - len(untried)
    others = sorted({case.name for case in cases()[1]})
    return "\n".join(
        [
            "# Text models of transformers",
            "",
            "<!-- Written by benchmarks/text_models.py: do not edit. -->",
            "",
            *textwrap.wrap(
                "`python benchmarks/text_models.py` puts each text model class of `transformers` "
                f"{version('transformers')} that has one of the three heads through `raycloak plan`, in its smallest "
                f"configuration. Of {tried} classes, {trains['whole']} train as a whole, and {trains['lora']} others "
                "with LoRA on all linear layers. `raycloak plan` tells the same of your own checkpoint before anything "
                "is charged.",
                120,
            ),
            "",
            *textwrap.wrap(
                "A cell says what can be trained of a type of model under this `task`. LoRA was tried where the whole "
                "is refused; `no` stands where both are. An empty cell: no such class.",
                120,
            ),
            "",
            *tables(found),
            "",
            "## What was not tried",
            "",
            f"These classes also take pictures, sound or another model's states: {', '.join(others)}.",
            *(["", f"This script builds no small configuration of these: {', '.join(untried)}."] if untried else []),
            *(["", f"These have no result yet: {', '.join(missing)}."] if missing else []),
            "",
        ]
    )


def tables(found: list[Result]) -> list[str]:
    """Return the lines of the page that follow from the results alone."""
    refused = [each for each in found if each.code and each.code != "not tried"]
    return [
        "| type | " + " | ".join(f"`{task}`" for task in HEADS) + " |",
        "|---|---|---|---|",
        *_rows(found),
        "",
        "## What is refused, why, and what to do",
        "",
        "| class | trained | why | what to do |",
        "|---|---|---|---|",
        *(
            f"| {', '.join(classes)} | {modes} | `{code}`: {_cell(message)} | {_cell(remedy)} |"
            for (modes, code, message, remedy), classes in _reasons(refused)
        ),
    ]


def _rows(found: list[Result]) -> Iterator[str]:
    words = {(): "no", ("whole",): "all of it", ("lora",): "LoRA"}
    for kind in dict.fromkeys(each.kind for each in found):
        cells = []
        for task in HEADS:
            own = [each for each in found if (each.kind, each.task) == (kind, task) and each.code != "not tried"]
            cells.append(words[tuple(each.mode for each in own if not each.code)] if own else "")
        if any(cells):
            yield f"| {kind} | " + " | ".join(cells) + " |"


def _reasons(refused: list[Result]) -> list[tuple[tuple[str, str, str, str], list[str]]]:
    """Return each reason with the classes that have it; a class that is refused in both ways for one reason once."""
    of_class: dict[tuple[str, str, str, str], list[str]] = {}
    for each in refused:
        of_class.setdefault((each.name, each.code, _general(each), each.remedy), []).append(each.mode)
    found: dict[tuple[str, str, str, str], list[str]] = {}
    for (name, code, message, remedy), modes in of_class.items():
        words = ", ".join("LoRA" if mode == "lora" else mode for mode in modes)
        found.setdefault((words, code, message, remedy), []).append(name)
    return sorted(found.items(), key=lambda item: item[1][0])


def _general(result: Result) -> str:
    """Return the message without what names the class and the folder, so that equal reasons are equal."""
    message = result.message.replace(result.name, "it").replace("net is a model of type", "a model of type")
    return re.sub(r"'model\.(base_model\.model\.)?([^']*)'", r"'\2'", message)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _line(result: Result) -> str:
    return json.dumps(asdict(result)) + "\n"


def _takes_text(kind: str, name: str) -> bool:
    import transformers

    _, classes = _auto()
    parts = {kind, *classes.CONFIG_MAPPING[kind].sub_configs}
    found = getattr(transformers, name, None)
    return found is not None and found.main_input_name == "input_ids" and not any(map(BEYOND.search, parts))


def _auto() -> tuple[Any, Any]:
    from transformers.models.auto import configuration_auto, modeling_auto

    return modeling_auto, configuration_auto


if __name__ == "__main__":
    main()
