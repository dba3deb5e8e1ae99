"""gpt against transformers: from the same safetensors of GPT-2, with the same batches and AdamW in fp32, both have the same
losses to fp32's rounding; what gpt exports has the weights that torch has come to. Random weights; nothing is downloaded.

    transformers_test.py GPT EBB_CHECKPOINT
"""
import csv
import json
import subprocess
import sys
import tempfile
from pathlib import Path

try:
    import torch
    import transformers
except ImportError as error:
    print(f"Skipped: {error}; install torch and transformers for the first python3 of PATH")
    sys.exit(77)

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
gpt, tool = sys.argv[1:]
CONTEXT, BATCH, STEPS, SEED = 32, 4, 12, 7
# A gradient that is rounding, of 1e-8, then moves a weight by 1e-7 a step. With 1e-8 Adam makes 5e-4 of it.
EPS = 1e-4
MASK = (1 << 64) - 1


def scramble(x):  # examples/gpt/data/text.cc
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def batches(text, ranks):
    training = len(text) - max(len(text) // 20, CONTEXT + 1)
    for step in range(STEPS):
        at = [scramble(scramble(SEED) ^ (step * ranks * BATCH + i)) % (training - CONTEXT) for i in range(ranks * BATCH)]
        yield torch.tensor([list(text[a:a + CONTEXT + 1]) for a in at])


def torch_losses(folder, text, ranks):
    model = transformers.GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), eps=EPS, weight_decay=0.1)
    losses = []
    for batch in batches(text, ranks):
        logits = model(batch[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


def run(*arguments, code=0):
    done = subprocess.run(list(map(str, arguments)), capture_output=True, text=True)
    assert done.returncode == code, f"{arguments}: exit {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


with tempfile.TemporaryDirectory() as made:
    folder = Path(made)
    torch.manual_seed(1)
    torch.use_deterministic_algorithms(True)
    config = transformers.GPT2Config(vocab_size=300, n_positions=CONTEXT, n_embd=64, n_layer=2, n_head=4, resid_pdrop=0,
                                     embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=0)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder / "first", max_shard_size="100KB")
    text = Path(__file__).read_bytes()
    (folder / "text").write_bytes(text)
    (folder / "config.json").write_text(json.dumps({
        "gradient_clipping": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.99], "eps": EPS, "weight_decay": 0.1}}}))

    def train(ranks, *more, code=0):
        return run(gpt, "--config", folder / "config.json", "--data", folder / "text", "--layers", 2, "--heads", 4, "--width", 64,
                   "--context", CONTEXT, "--vocabulary", 300, "--batch", BATCH, "--steps", STEPS, "--seed", SEED, "--dtype", "fp32",
                   "--ranks", ranks, "--threads", 1, "--sample", 0, *more, code=code)

    for ranks in (1, 2):
        out = folder / f"out{ranks}"
        train(ranks, "--init-from", folder / "first", "--losses", folder / "losses.csv", "--export", out, "--save",
              folder / f"runs{ranks}")
        with open(folder / "losses.csv") as file:
            ours = [float(row["loss"]) for row in csv.DictReader(file)]
        theirs, trained = torch_losses(folder / "first", text, ranks)
        worst = max(abs(a - b) for a, b in zip(ours, theirs))
        print(f"{ranks} ranks: {len(ours)} losses from {theirs[0]:.4f} to {theirs[-1]:.4f}, at most {worst:.1e} apart")
        assert len(ours) == STEPS and theirs[-1] < theirs[0] - 0.5 and worst < 1e-5
        exported = transformers.GPT2LMHeadModel.from_pretrained(out)
        for name, value in trained.state_dict().items():
            torch.testing.assert_close(exported.state_dict()[name], value, rtol=1e-3, atol=1e-5)
        # The checkpoint gives the same, with the model's config.json.
        run(tool, "export", folder / f"runs{ranks}", folder / f"from_runs{ranks}")
        run(tool, "diff", out, folder / f"from_runs{ranks}")
        transformers.GPT2LMHeadModel.from_pretrained(folder / f"from_runs{ranks}")
        # An export begins a run as well as a checkpoint does.
        train(ranks, "--init-from", out, "--steps", 0)
        train(ranks, "--init-from", folder / f"runs{ranks}", "--steps", 0)

    assert "not empty" in train(1, "--export", out, code=2)
    # An export that cannot get its name is an error before training, which would be lost.
    (folder / "link").symlink_to(folder / "real")
    (folder / "real").mkdir()
    (folder / ".writing-killed").mkdir()
    (folder / "file").touch()
    for name, said in (("link", "is a link or a file"), ("link/", "is a link or a file"), ("killed", "or was killed"),
                       ("file/new/export", "Not a directory")):
        shown = train(1, "--export", f"{folder}/{name}", code=2)
        assert said in shown and "step 1/" not in shown, shown
    said = train(2, "--init-from", folder / "first", "--layers", 3, code=2)
    assert "it lacks 'block2.norm1.weight'" in said, said
    said = train(1, "--init-from", folder / "first", "--context", 16, code=2)
    assert "'embedding.positions' has the shape [32, 64] there and [16, 64] in the model" in said, said
    assert "absent" in train(2, "--init-from", folder / "absent", code=2)
