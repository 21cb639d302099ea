"""A training loop of your own. The service charges, masks and attests each step of it; here it runs on this machine."""

import sys
from pathlib import Path

import raycloak

CONFIG = raycloak.TrainingConfig(
    model="models:digits_mlp",
    dataset="digits",
    expected_batch_size=720,
    steps=int(sys.argv[1]) if len(sys.argv) > 1 else 20,
    optimizer={"learning_rate": 1.5, "momentum": 0.9},
    dp_config={"target_epsilon": 8.0},
)
DIGITS = {"dataset": {"kind": "digits", "public": True}}

with (
    raycloak.ServiceClient.local(
        datasets={"digits": DIGITS}, code=["models:digits_mlp"], run={"num_workers": 2}, base=Path(__file__).parent
    ) as service,
    service.create_training_client(CONFIG) as tc,
):
    for _ in range(CONFIG.steps):
        fb = tc.forward_backward()  # charges, computes and masks
        opt = tc.optim_step()  # submitted before fb is awaited: they overlap
        print(f"step {opt.result().step}: ε {opt.result().dp_metrics.epsilon_spent:.3f}")
    artifact = tc.save_state(metadata={"epoch": 1}).result()
    service.save_artifact(artifact.artifact_id, "model.tssp")
    tc.load_state(artifact.artifact_id).result()
print("released model", artifact.model_digest)
