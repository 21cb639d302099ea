"""Run by tests/ray/test_service.py: a caller's loop over a service, in two processes of which the first is killed.

    python -m tests.ray.looping ADDRESS FOLDER [CLIENT_ID]

FOLDER has the certificate of the service and the token. Each line of output is a JSON object; after it the loop waits
for a line of input.
"""

import json
import sys
from pathlib import Path

import raycloak

STEPS, SUBMITTED = 8, 6
CONFIG = {
    "model": "raycloak.coordinator.runs.demo:digits_model",
    "dataset": "digits",
    "steps": STEPS,
    "expected_batch_size": 64,
    "micro_batch_size": 64,
    "optimizer": {"learning_rate": 1.5, "momentum": 0.9},
    "dp_config": {"accountant": "rdp", "noise_multiplier": 2.0, "epsilon_cap": 20.0},
}
SOON = 300.0


def say(**what):
    """Tell the test, and wait until it answers."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()
    assert sys.stdin.readline() == "go\n"


def begin(service):
    """Submit all steps but the last two."""
    client = service.create_training_client(CONFIG)
    steps = [(client.forward_backward(), client.optim_step())]
    assert steps[0][1].result(SOON).step == 1
    computed = client.forward_backward()
    assert computed.result(SOON).step == 1
    say(client=client.client_id)
    # Over the same connection, while another process of the service comes up.
    assert client.optim_step().result(SOON).step == 2
    for _ in range(2, SUBMITTED):
        client.forward_backward()
        client.optim_step()
    # What is submitted is sent, and nobody waits for its results.
    client.detach()
    say(submitted=SUBMITTED)


def go_on(client):
    """Attach to what another process has begun, and finish it."""
    futures = list(client.futures().values())
    assert [each.kind for each in futures] == ["forward_backward", "optim_step"] * SUBMITTED
    steps = [each.result(SOON) for each in futures[1::2]]
    for step in range(SUBMITTED, STEPS):
        assert client.forward_backward().result(SOON).step == step
        say(computed=step)
        steps.append(client.optim_step().result(SOON))
    client.close()
    summary = client.refresh().summary
    say(
        run_id=summary.run_id,
        digests=[each.model_digest for each in steps],
        epsilons=[each.dp_metrics.epsilon_spent for each in steps],
        steps=[each.step for each in steps],
    )


def main():
    address, folder, *client_id = sys.argv[1:]
    credentials = raycloak.ServiceCredentials(token_file=Path(folder) / "token", ca=Path(folder) / "service.pem")
    with raycloak.ServiceClient(address, credentials, patience_s=SOON) as service:
        if client_id:
            go_on(service.get_client(*client_id))
        else:
            begin(service)


if __name__ == "__main__":
    main()
