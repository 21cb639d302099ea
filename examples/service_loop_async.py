"""The loop of service_loop.py in an event loop: two runs beside each other, and every step submitted at once."""

import asyncio
import sys
from pathlib import Path

import raycloak

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 20
DIGITS = {"dataset": {"kind": "digits", "public": True}}


async def train(service: raycloak.ServiceClient, learning_rate: float) -> str:
    """Train one model, and return the digest of what was released."""
    config = raycloak.TrainingConfig(
        name=f"rate-{learning_rate}",
        model="models:digits_mlp",
        dataset="digits",
        expected_batch_size=720,
        steps=STEPS,
        optimizer={"learning_rate": learning_rate},
        dp_config={"target_epsilon": 8.0},
    )
    with service.create_training_client(config) as tc:
        steps = [(tc.forward_backward(), tc.optim_step()) for _ in range(STEPS)]
        for _, opt in steps:
            done = await opt
            print(f"{config.name} step {done.step}: ε {done.dp_metrics.epsilon_spent:.3f}")
        return (await tc.save_state()).model_digest


async def main() -> None:
    local = {"datasets": {"digits": DIGITS}, "code": ["models:digits_mlp"], "run": {"num_workers": 2}}
    with raycloak.ServiceClient.local(**local, base=Path(__file__).parent) as service:
        print(await asyncio.gather(train(service, 1.5), train(service, 0.5)))


asyncio.run(main())
