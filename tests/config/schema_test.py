"""Validates the corpus, and files that are wrong, against the JSON Schema. Exit code 77: jsonschema is not installed."""

import json
import pathlib
import re
import sys

try:
    import jsonschema
except ImportError:
    print("skipped: Python's jsonschema is not installed (Debian: python3-jsonschema)")
    sys.exit(77)

source = pathlib.Path(sys.argv[1])
schema = json.loads((source / "runtime/config/ebb-config.schema.json").read_text())
jsonschema.Draft7Validator.check_schema(schema)
validator = jsonschema.Draft7Validator(schema)


def errors_of(document):
    return [f"{'.'.join(map(str, error.path))}: {error.message[:200]}" for error in validator.iter_errors(document)]


failed = False
for path in sorted((source / "tests/config/corpus").glob("*.json")):
    if path.stem == "old_forms":  # has comments, and text for numbers, which an editor should underline
        continue
    for error in errors_of(json.loads(path.read_text())):
        print(f"{path}: {error}")
        failed = True

example = (source / "examples/gpt/config.json").read_text()
for error in errors_of(json.loads(re.sub(r"//.*", "", example))):
    print(f"examples/gpt/config.json: {error}")
    failed = True

WRONG = [
    {"zero_optimization": {"stage": 4}},
    {"zero_optimization": {"stage": 2.5}},
    {"zero_optimization": {"stag": 2}},
    {"zero_optimization": {"offload_param": {"device": "disk"}}},
    {"zero_optimization": {"zero_quantized_weights": True}},
    {"train_batch_size": 0},
    {"train_batch_size": "8"},
    {"fp16": {"level": "O2"}},
    {"fp16": {"enabled": "yes"}},
    {"bfloat16": {"enabled": 3}},
    {"optimizer": {"type": "Adan"}},
    {"optimizer": {"type": "AdamW", "params": {"betas": [0.9]}}},
    {"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 1]}}},
    {"amp": {"enabled": True}},
    {"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": True}}}},
    {"communication_data_type": "fp8"},
    {"ebb": {"prefetch": 2}},
    {"ebb": {"host_memory": "much"}},
    {"ebb": {"parameter_groups": {"g": {"lr": 1}}}},
    {"ebb": {"parameter_groups": {"g": {"optimizer": {"type": "Adan"}}}}},
    [],
]
for document in WRONG:
    if not errors_of(document):
        print(f"is accepted and should not be: {document}")
        failed = True
sys.exit(1 if failed else 0)
