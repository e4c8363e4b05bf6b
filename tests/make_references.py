"""Make the stored references: `python tests/make_references.py [FAMILY ...]`. Needs torch and transformers.

Per case, transformers names the tensors (by saving a model of that config), numpy fills them from the case's seed, and
transformers loads that folder and computes the logits. Only config, names, shapes and logits are stored.
"""

import json
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from family_cases import Case, cases, family_names, reference_path
from foreign import save_folder
from safetensors import safe_open

# Known to transformers as the language model of a larger one only.
transformers.AutoModelForCausalLM.register(
    transformers.Mistral4Config, transformers.Mistral4ForCausalLM, exist_ok=True
)


def names_and_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Every tensor of a saved model."""
    shapes = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "np") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return shapes


def save_untrained(case: Case, folder: Path) -> dict[str, Any]:
    """Let transformers write a model of the case's config; -> its config.json."""
    config = transformers.AutoConfig.for_model(**case.config)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


def load_theirs(folder: Path, dtype: torch.dtype = torch.float32, attention: str = "eager") -> Any:
    """The folder as transformers loads it, refused unless every tensor found its place."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation=attention, output_loading_info=True
    )
    lost = {key: names for key, names in info.items() if names}
    assert not lost, lost
    return model.eval()


def their_logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    """int [B,T] -> float32 [B,T,V]."""
    with torch.no_grad():
        return model(torch.from_numpy(tokens).long()).logits.float().numpy()


def make_case(case: Case) -> tuple[dict[str, Any], dict[str, tuple[int, ...]], np.ndarray]:
    """(config.json, names with shapes, logits [T,V])."""
    with tempfile.TemporaryDirectory() as scratch:
        config = save_untrained(case, Path(scratch) / "names")
        shapes = names_and_shapes(Path(scratch) / "names")
        folder = save_folder(Path(scratch) / "filled", config, case.tensors(shapes))
        return config, shapes, their_logits(load_theirs(folder, attention=case.attention), case.tokens())[0]


def main(names: list[str]) -> None:
    logging.disable(logging.WARNING)
    for family in names or family_names():
        stored: dict[str, np.ndarray] = {}
        for case in cases(family):
            config, shapes, logits = make_case(case)
            stored[f"{case.name}/about"] = np.array(json.dumps({"config": config, "shapes": shapes}))
            stored[f"{case.name}/logits"] = logits
        reference_path(family).parent.mkdir(exist_ok=True)
        np.savez_compressed(reference_path(family), **stored)
        print(f"{family}: {len(cases(family))} cases, {reference_path(family).stat().st_size} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
