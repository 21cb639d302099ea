"""The low-rank delta of an adapter over encrypted activations: CKKS by TenSEAL's SEAL, one parameter set.

Experimental. It hides a client's hidden states from the server, even from a broken enclave. It
does not hide the adapter from the client: some d tokens of ordinary input a layer give the adapter away
(`docs/encrypted-adapters.md`).

Doors: adapter_worker, client_keys, evaluation_keys, flooding, parameters, projection, released_keys,
seal_objects.

May import: `raycloak`.
"""
