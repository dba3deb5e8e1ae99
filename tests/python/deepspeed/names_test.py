"""The names, the command and what it starts."""

import ast
import os
import pathlib
import subprocess
import sys

import loops
import pytest
import torch
from ranks import on_one

ROOT = pathlib.Path(__file__).parents[3]


def _run(*arguments, folder=None, **variables):
    environment = {**os.environ, **variables}
    return subprocess.run([sys.executable, "-m", "ebb.deepspeed", *arguments], capture_output=True, text=True, cwd=folder, env=environment, timeout=200)


def _written(folder, text, name="train.py"):
    path = folder / name
    path.write_text(text)
    return str(path)


def test_each_name_of_the_table_can_be_imported_and_has_a_verdict():
    deepspeed = loops.deepspeed()
    from ebb.deepspeed import names

    for row in names.TABLE:
        for module in row.modules.split():
            for name in row.names.split():
                if name != "*":
                    full = "deepspeed" + ("" if module == "." else f".{module}")
                    imported: dict = {}
                    exec(f"from {full} import {name} as found", imported)
                    expected = "refused: " + str(row.note) if row.source in ("refused", "later") else "runs"
                    assert names.verdict(f"{full}.{name}") == expected
    assert deepspeed.runtime.engine.DeepSpeedEngine is deepspeed.DeepSpeedEngine


def test_each_builder_has_its_name_among_the_compatible_ones():
    ops = loops.deepspeed().ops
    builders = [getattr(ops.op_builder, f"{name}Builder") for name in "CPUAdam FusedAdam CPULion FusedLion CPUAdagrad FusedLamb AsyncIO Utils Transformer".split()]
    assert all(ops.__compatible_ops__[one.NAME] and one().is_compatible() for one in builders)
    assert {one.NAME for one in builders} == set(ops.__compatible_ops__)
    assert ops.aio.AsyncIOBuilder is ops.op_builder.AsyncIOBuilder


def test_a_refused_name_raises_when_it_is_called():
    deepspeed = loops.deepspeed()
    import ebb

    assert not isinstance(3, deepspeed.PipelineModule)
    with pytest.raises(ebb.Error, match="deepspeed.PipelineModule is not built: there are no pipeline stages") as caught:
        deepspeed.PipelineModule(layers=[])
    assert caught.value.code == "UNIMPLEMENTED"
    with pytest.raises(ebb.Error, match="of a parameter that no engine has: do that after deepspeed.initialize"):
        deepspeed.utils.safe_get_full_grad(torch.nn.Parameter(torch.zeros(1)))


def test_a_name_that_ebb_lacks_raises_by_name():
    deepspeed = loops.deepspeed()
    with pytest.raises(ModuleNotFoundError, match="Ebb has no 'deepspeed.nebula' under DeepSpeed's names"):
        import deepspeed.nebula  # noqa: F401
    with pytest.raises(AttributeError, match="Ebb has no 'deepspeed.utils.nonsense'"):
        deepspeed.utils.nonsense


def _as_table(rows):
    lines = ["| name | here |", "|---|---|"]
    for row in rows:
        first = row.modules.split()[0]
        prefix = "" if first == "." else f"{first}."
        names = ", ".join(f"`{prefix}{name}`" for name in row.names.split())
        note = {"value": f"`{row.note!r}`", "refused": f"refused: {row.note}", "nothing": f"does nothing: {row.note}"}
        lines.append(f"| {names} | {note.get(row.source, row.note)} |")
    return "\n".join(lines)


def test_the_page_has_the_table():
    from ebb.deepspeed import names

    page = ROOT / "docs" / "deepspeed.md"
    first, last = "<!-- The table is made by tests/python/deepspeed/names_test.py: EBB_WRITE_DOCUMENTS=1 writes it. -->\n\n", "\n\n<!-- end -->"
    text = page.read_text()
    before, _, rest = text.partition(first)
    after = rest.partition(last)[2]
    expected = before + first + _as_table(names.TABLE) + last + after
    if os.environ.get("EBB_WRITE_DOCUMENTS"):
        page.write_text(expected)
    assert page.read_text() == expected


def test_check_lists_the_names_of_a_program(tmp_path):
    path = _written(tmp_path, "import deepspeed\nfrom deepspeed.moe.layer import MoE\nfrom deepspeed.ops.adam import FusedAdam as Adam\n"
                              "engine = deepspeed.initialize()\ndeepspeed.zero.Init()\ndeepspeed.wonders\nprint(deepspeed.__file__)\n")
    done = _run("--check", path)
    assert done.returncode == 1
    assert f"{path}: deepspeed.initialize: runs" in done.stdout
    assert f"{path}: deepspeed.moe.layer.MoE: refused: experts are not spread over ranks" in done.stdout
    assert f"{path}: deepspeed.wonders: unknown" in done.stdout
    assert "deepspeed.ops.adam.FusedAdam: runs" in done.stdout and "deepspeed.zero.Init: runs" in done.stdout
    assert f"{path}: deepspeed.__file__: runs" in done.stdout


def test_check_sees_names_behind_other_names():
    from ebb.deepspeed.__main__ import names_used

    text = "import deepspeed.comm as dist\nfrom deepspeed import zero\nfrom deepspeed.utils import *\ndist.barrier()\nwith zero.Init(): pass"
    assert set(names_used(ast.parse(text))) == {
        "deepspeed.comm", "deepspeed.zero", "deepspeed.utils", "deepspeed.comm.barrier", "deepspeed.zero.Init"
    }


def test_check_knows_the_methods_of_classes():
    loops.deepspeed()
    from ebb.deepspeed import names

    engine, optimizer = "deepspeed.runtime.engine.DeepSpeedEngine", "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer"
    assert names.verdict(f"{engine}.module_state_dict") == names.verdict(f"{optimizer}.step") == "runs"
    assert names.verdict(f"{engine}._broadcast_model") == names.verdict(f"{optimizer}.get_all_grad_tensors") == "unknown"


def test_a_script_and_its_children_find_the_package(tmp_path):
    path = _written(tmp_path, """
import importlib.metadata, importlib.util, multiprocessing, pickle, subprocess, sys
def version(queue):
    import deepspeed
    queue.put(deepspeed.__version__)
if __name__ == "__main__":
    assert importlib.util.find_spec("deepspeed") and importlib.metadata.version("deepspeed") == "0.19.8"
    import deepspeed
    assert pickle.loads(pickle.dumps(deepspeed.DeepSpeedEngine)) is deepspeed.DeepSpeedEngine
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=version, args=(queue,))
    process.start()
    child = subprocess.run([sys.executable, "-c", "import deepspeed; print(deepspeed.__ebb__)"], capture_output=True, text=True)
    print(queue.get(), child.stdout.strip(), sys.argv[1:])
""")
    import ebb

    done = _run(path, "--deepspeed", "x.json")
    assert done.stdout == f"0.19.8 {ebb.__version__} ['--deepspeed', 'x.json']\n", done.stderr


def test_the_package_has_its_files():
    from ebb.deepspeed import PATH

    command = pathlib.Path(PATH, "bin", "deepspeed")
    assert os.access(command, os.X_OK) and pathlib.Path(PATH, "deepspeed", "__init__.py").is_file()
    # Not *.dist-info, because scikit-build-core leaves such folders out of the wheel.
    assert "Version: 0.19.8\n" in pathlib.Path(PATH, "deepspeed-0.19.8.egg-info", "PKG-INFO").read_text()


def test_the_import_is_short_and_has_no_engine():
    done = _run("-c", "import sys, deepspeed; print(sorted(one for one in sys.modules if one.startswith('ebb.deepspeed')))")
    assert done.stdout == "['ebb.deepspeed', 'ebb.deepspeed.names']\n", done.stderr


@pytest.mark.parametrize("name", ["deepspeed", "accelerate.utils"])
def test_install_after_what_looked_for_deepspeed_is_an_error(name, tmp_path):
    from ebb.deepspeed import PATH

    folder = tmp_path
    for part in name.split("."):
        folder /= part
        folder.mkdir()
        (folder / "__init__.py").write_text("")
    path = _written(tmp_path, f"import {name}, ebb.deepspeed\ntry:\n    ebb.deepspeed.install()\nexcept ImportError as error:\n    print(error)\n")
    python_path = os.pathsep.join(one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one != PATH)
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": python_path}, timeout=200)
    assert f"{name} is imported already, from {folder}" in done.stdout, done.stderr


def test_the_launcher_starts_a_process_for_each_number(tmp_path):
    path = _written(tmp_path, """
import os, sys, pathlib
name = f"rank{os.environ['RANK']}of{os.environ['WORLD_SIZE']}"
pathlib.Path(sys.argv[2], name).write_text(sys.argv[1] + " " + os.environ["LOCAL_RANK"] + " " + sys.argv[3])
""")
    done = _run("deepspeed", "--num_gpus", "2", "--master_port", "29777", path, str(tmp_path), "--lr", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "rank0of2").read_text() == "--local_rank=0 0 --lr" and (tmp_path / "rank1of2").read_text() == "--local_rank=1 1 --lr"


def test_the_launcher_ends_all_with_the_code_of_the_first_that_fails(tmp_path):
    path = _written(tmp_path, "import os, signal, sys\nsys.exit(7) if os.environ['RANK'] == '1' else signal.pause()\n")
    assert _run("deepspeed", "--num_gpus", "2", path, CUDA_VISIBLE_DEVICES="").returncode == 7


@pytest.mark.parametrize("option, value", [("--launcher", "pdsh"), ("--autotuning", "run"), ("--num_nodes", "2"), ("--include", "worker-1:0")])
def test_the_launcher_refuses_other_hosts(option, value, capsys):
    from ebb.deepspeed import launcher

    with pytest.raises(SystemExit):
        launcher.main([option, value, "train.py"])
    assert "use torchrun or srun" in capsys.readouterr().err


def test_the_launcher_refuses_a_hostfile_with_other_hosts(tmp_path, capsys):
    from ebb.deepspeed import launcher

    assert launcher._parser().parse_args(["train.py"]).hostfile == "/job/hostfile"  # as DeepSpeed's
    hosts = _written(tmp_path, "# two\nlocalhost slots=1\nworker-1 slots=1\n", "hosts")
    with pytest.raises(SystemExit):
        launcher.main(["--hostfile", hosts, "train.py"])
    assert "--hostfile with other hosts: " in capsys.readouterr().err


def test_ranks_that_the_program_was_to_connect_are_an_error(monkeypatch):
    comm = loops.deepspeed().comm
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    with pytest.raises(AssertionError, match="Distributed backend is not initialized"):
        comm.init_distributed(dist_init_required=False)


def test_a_command_that_is_not_there():
    done = _run("no-such-command-here")
    assert done.returncode == 127 and "no-such-command-here" in done.stderr


@on_one
def test_an_optimizer_of_deepspeed_without_an_engine_raises():
    import ebb

    adam = loops.deepspeed().ops.adam.DeepSpeedCPUAdam([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    with pytest.raises(ebb.Error, match="without an engine"):
        adam.step()
    with pytest.raises(ValueError, match="set 'gradient_clipping'"):
        loops.deepspeed().ops.lamb.FusedLamb([torch.nn.Parameter(torch.zeros(2))], max_grad_norm=1.0)


def test_the_accelerator_of_a_host_without_a_gpu():
    accelerator = loops.deepspeed().accelerator.get_accelerator()
    if torch.cuda.is_available():
        pytest.skip("this host has a GPU")
    assert accelerator is loops.deepspeed().get_accelerator()
    assert (accelerator.device_name(), accelerator.current_device_name(), accelerator.communication_backend_name()) == ("cpu", "cpu", "gloo")
    assert accelerator.max_memory_cached() == 0 and accelerator.available_memory() > 0 and accelerator.is_bf16_supported()
    with accelerator.stream(accelerator.Stream()):
        accelerator.manual_seed(3)
        assert accelerator.initial_seed() == 3
    with pytest.raises(AttributeError, match="Ebb's accelerator has no 'wonders'"):
        accelerator.wonders
