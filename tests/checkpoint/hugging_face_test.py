"""ebb-checkpoint against Python's own safetensors, torch and transformers: it imports their files, and its exported files give
the same logits in them. Weights are random; the test downloads nothing.

    hugging_face_test.py EBB_CHECKPOINT
"""
import shutil
import tempfile
from pathlib import Path

from program_under_test import require, run

require("torch", "transformers", "safetensors")
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


def gpt2():
    config = transformers.GPT2Config(vocab_size=300, n_positions=32, n_embd=48, n_layer=3, n_head=4, resid_pdrop=0, embd_pdrop=0,
                                     attn_pdrop=0, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config)


def llama(tied):
    config = transformers.LlamaConfig(vocab_size=300, hidden_size=48, intermediate_size=96, num_hidden_layers=2,
                                      num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
                                      tie_word_embeddings=tied)
    return transformers.LlamaForCausalLM(config)


def logits(model):
    with torch.no_grad():
        return model.eval()(torch.arange(64).reshape(2, 32) * 4 % 300).logits


def same_logits(kind, saved, exported, dtype):
    expected, loaded = (kind.from_pretrained(folder, dtype=dtype) for folder in (saved, exported))
    assert loaded.dtype == dtype
    assert torch.equal(logits(loaded), logits(expected))


def there_and_back(name, model, folder):
    for size in ("5GB", "60KB"):
        saved, runs = folder / f"{name}-{size}", folder / f"{name}-{size}-runs"
        model.save_pretrained(saved, max_shard_size=size)
        several = (saved / "model.safetensors.index.json").exists()
        assert several == (size == "60KB")
        run("import", saved, runs)
        assert "have the checksums that were saved" in run("inspect", runs)
        for file in runs.glob("step-*/*.safetensors"):
            with safe_open(file, "pt") as opened:
                assert all(opened.get_tensor(key).isfinite().all() for key in opened.keys())
        for dtype, word in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
            for file_size in ("5GB", "70KB"):
                exported = folder / f"{name}-{size}-{word}-{file_size}"
                run("export", runs, exported, "--dtype", word, "--file-size", file_size)
                assert (exported / "model.safetensors.index.json").exists() == (file_size == "70KB")
                same_logits(type(model), saved, exported, dtype)
                if word == "fp32":
                    run("import", exported, folder / "again")
                    run("diff", runs, folder / "again")
                    shutil.rmtree(folder / "again")


with tempfile.TemporaryDirectory() as made:
    folder = Path(made)
    torch.manual_seed(1)
    model = gpt2()
    there_and_back("gpt2", model, folder)
    there_and_back("llama", llama(False), folder)
    there_and_back("llama-tied", llama(True), folder)

    # Orientation: Ebb has [out, in], Conv1D has [in, out].
    assert "block0.up.weight [192, 48] " in " ".join(run("inspect", folder / "gpt2-5GB-runs").split())

    # Files of the bare model, its masks among them, and with the tied head beside the table.
    bare = {k.removeprefix("transformer."): v.clone() for k, v in model.state_dict().items()}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 32, 32)
    save_file(bare, folder / "bare.safetensors")
    assert "left out: h.0.attn.bias" in run("import", folder / "bare.safetensors", folder / "bare")
    assert "have the same bits" in run("diff", folder / "bare", folder / "gpt2-5GB-runs")
    bare["lm_head.weight"][0, 0] += 1
    save_file(bare, folder / "untied.safetensors")
    assert "GPT-2 has one table for both" in run("import", folder / "untied.safetensors", folder / "untied", code=2)
    assert not (folder / "untied").exists()

    # One bit of one value.
    changed = dict(bare, **{"lm_head.weight": bare["wte.weight"].clone()})
    changed["ln_f.bias"] = changed["ln_f.bias"].clone()
    changed["ln_f.bias"][3] = 2.0
    save_file(changed, folder / "changed.safetensors")
    run("import", folder / "changed.safetensors", folder / "changed")
    assert "'final_norm.bias': 1 of 48 elements differ, by at most 2" in run("diff", folder / "bare", folder / "changed", code=1)

    # Every dtype and shape that the package writes.
    odd = {"half": torch.randn(5).half(), "scalar": torch.tensor(3.5), "empty": torch.zeros(0, 4),
           "bytes": torch.arange(7, dtype=torch.uint8), "flags": torch.tensor([True, False]), "double": torch.randn(3).double(),
           "eight": torch.randn(4).to(torch.float8_e4m3fn), "long": torch.arange(3), "é \"quoted\"/@0:1": torch.randn(2, 3)}
    save_file(odd, folder / "odd.safetensors", {"a": "b"})
    shown = run("inspect", folder / "odd.safetensors")
    assert "long is no parameter" in shown and "scalar" in shown, shown
    assert "double is F64, not F32, BF16 or F16" in shown and "eight is F8_E4M3, not" in shown, shown
print("imported, exported and compared")
