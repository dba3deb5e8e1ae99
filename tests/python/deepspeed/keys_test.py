"""The JSON's keys of DeepSpeed 0.19.8: each is taken as there, or refused with a reason."""

import loops
import pytest
import training
from ranks import on_one

_OFF = {"enabled": False}
_ON = {"enabled": True}
_QUANTIZED = {"weight_quantization": {"shared_parameters": {"enabled": True}}}
TAKEN = {  # what loops.config() gets, beside its own keys
    "names with a dot": {"zero_optimization.reduce_bucket_size": 4096, "zero_optimization.stage3_param_persistence_threshold": 640},
    "removed keys, off": {
        "compression_training": {}, "quantize_training": _OFF, "eigenvalue": _OFF, "sparse_attention": None, "elasticity": _OFF, "amp": _OFF,
        "curriculum_learning": _OFF, "progressive_layer_drop": _OFF, "sparse_gradients": False, "graph_harvesting": False, "nebula": _OFF,
    },
    "removed keys that change no number": {"sparse_gradients": True, "graph_harvesting": True, "nebula": _ON},
    "mics_shard_size": {"zero": {"mics_shard_size": 1}},
    "mics_hierarchical_params_gather": {"zero": {"mics_shard_size": 1, "mics_hierarchical_params_gather": True}},
    "elastic_checkpoint": {"zero": {"elastic_checkpoint": True}},
    "managed_gradient_accumulation": {"managed_gradient_accumulation": False},
    "gradient_allreduce_op": {"gradient_allreduce_op": "sum"},
    "compute_grad_norm": {"zero": {"compute_grad_norm": True}},
    "compute_grad_norm without clipping": {"zero": {"compute_grad_norm": False}, "gradient_clipping": 0.0},
    "parameter_alignment": {"zero": {"parameter_alignment": 8}},
    "keep_in_fp32_modules": {"data_types": {"keep_in_fp32_modules": "auto"}},
    "keep_in_fp32_modules, names": {"data_types": {"keep_in_fp32_modules": ["scale"]}},
    "buffer_dtype": {"data_types": {"buffer_dtype": "fp32"}},
    "param_dtype": {"data_types": {"param_dtype": "fp32"}},
    "torch_autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "compile": {"compile": {"deepcompile": False}},
    "load_universal": {"checkpoint": {"load_universal": True}},
    "expert_parallel, off": {"expert_parallel": _OFF},
    "sequence_parallel_size": {"sequence_parallel_size": 1},
    "tensor_parallel": {"tensor_parallel": {"autotp_size": 1}},
    "what logs": {"steps_per_print": 5, "wall_clock_breakdown": True, "dump_state": True, "flops_profiler": _ON, "tensorboard": _ON, "comms_logger": _ON},
}
REFUSED = {
    "compression_training": ({"compression_training": _QUANTIZED}, "compression_training.*removed"),
    "quantize_training": ({"quantize_training": _ON}, "quantize_training.*removed"),
    "eigenvalue": ({"eigenvalue": _ON}, "eigenvalue.*removed"),
    "sparse_attention": ({"sparse_attention": {"mode": "fixed"}}, "sparse_attention.*removed"),
    "elasticity": ({"elasticity": _ON}, "elasticity.*removed"),
    "amp": ({"amp": _ON}, "amp.*removed"),
    "curriculum_learning": ({"curriculum_learning": _ON}, "curriculum_learning.*removed"),
    "progressive_layer_drop": ({"progressive_layer_drop": _ON}, "progressive_layer_drop.*removed"),
    **{kind: ({"optimizer": {"type": kind}}, "removed") for kind in ("OneBitAdam", "ZeroOneAdam", "OneBitLamb")},
    "zeropp_loco_param": ({"zero": {"zeropp_loco_param": {"err_beta": 0.8}}}, "zeropp_loco_param"),
    "compute_grad_norm": ({"zero": {"compute_grad_norm": False}}, "compute_grad_norm.*gradient_clipping"),
    "keep_in_fp32_modules": ({"data_types": {"keep_in_fp32_modules": True}}, "keep_in_fp32_modules must be \"auto\" or a list"),
    "bf16_master_weights_and_grads": ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "bf16_master_weights_and_grads"),
    "expert_parallel": ({"expert_parallel": {"enabled": True, "autoep_size": 2}}, "expert_parallel"),
    "sequence_parallel_size": ({"sequence_parallel_size": 2}, "sequence_parallel_size"),
    "autotp_size": ({"tensor_parallel": {"autotp_size": 2}}, "autotp_size"),
    "torch_autocast beside bf16": ({"torch_autocast": _ON, "bf16": _ON}, "torch_autocast"),
    "lower_precision_safe_modules": ({"torch_autocast": {"enabled": True, "lower_precision_safe_modules": ["x"]}}, "lower_precision_safe_modules"),
    "param_dtype": ({"data_types": {"param_dtype": "bf16"}}, "param_dtype"),
}


@on_one
def test_what_changes_no_number_is_taken():
    expected = {}
    for name, more in [("", {}), ("", {"gradient_clipping": 0.0}), *TAKEN.items()]:
        engine = loops.begin(training.mlp(), loops.config(**more), loops.sgd)
        losses = loops.train(engine, training.vector_batches(2, 1))
        engine.destroy()
        of_these = expected.setdefault(more.get("gradient_clipping", 1.0), losses)
        assert losses == (pytest.approx(of_these, rel=1e-2) if name == "torch_autocast" else of_these), name


@on_one
def test_what_would_change_numbers_is_refused_with_its_name():
    import ebb

    deepspeed = loops.deepspeed()
    refusals = (ebb.Error, ValueError, deepspeed.DeepSpeedConfigError)
    for name, (more, said) in REFUSED.items():
        with pytest.raises(refusals, match=said):
            model = training.mlp()
            deepspeed.initialize(model=model, model_parameters=model.parameters(), config=loops.config(**{"optimizer": {"type": "SGD"}, **more}))
            raise AssertionError(f"'{name}' was taken")


@on_one
def test_bf16_optimizer_states_are_states_in_bf16():
    deepspeed = loops.deepspeed()
    for in_bf16 in (True, False):
        engine = loops.begin(training.mlp(), loops.config(bf16={"enabled": True, "bf16_optimizer_states": in_bf16}))
        loops.train(engine, [[(x.bfloat16(), y.bfloat16()) for x, y in of_step] for of_step in training.vector_batches(3, 1)])
        weight = next(engine.module.parameters())
        for state in ("exp_avg", "exp_avg_sq"):
            values = deepspeed.utils.safe_get_full_optimizer_state(weight, state)
            assert values.abs().max() > 0 and values.equal(values.bfloat16().float()) == in_bf16
        engine.destroy()
