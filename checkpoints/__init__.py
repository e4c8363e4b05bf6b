"""jaxlm's own files: Orbax arrays with the config, tokenizer and a manifest of hashes beside them; the known models.

What belongs here: saving and restoring onto target shardings, integrity checks. What does not: foreign formats
(conversion/) and anything that runs on the device (jaxlm/).
"""
