# The public headers. A project that links Ebb may include them, they are installed, and each must compile alone (tests/headers).
# The rule: only headers in these lists are public. A public header includes no internal header, none of NCCL, MPI or liburing,
# and, except in the second list, none of CUDA. Public are the headers of ebb/ebb.h, of backends, of the engine's arithmetic, and
# of helpers for a trainer's own program. examples/gpt includes only public headers (tests/headers). All other headers may change
# without notice.
set(ebb_public_headers
  ebb.h
  offload/memory_limits.h
  optim/cast.h
  optim/checksum.h
  optim/loss_scaler.h
  optim/norm.h
  optim/schedule.h
  optim/update.h
  optim/update_arrays.h
  runtime/base/dtype.h
  runtime/base/encoding.h
  runtime/base/io_backend.h
  runtime/base/name_view.h
  runtime/base/tier.h
  runtime/checkpoint/checkpoint.h
  runtime/checkpoint/parameter_files.h
  runtime/comm/backend.h
  runtime/comm/collective.h
  runtime/comm/communicator.h
  runtime/comm/launch/launch.h
  runtime/comm/of_rank.h
  runtime/comm/rendezvous/meeting_place.h
  runtime/comm/world.h
  runtime/config/bytes.h
  runtime/config/config.h
  runtime/config/keys.h
  runtime/device/awaited_event.h
  runtime/device/backend.h
  runtime/device/buffer.h
  runtime/device/device.h
  runtime/device/driver_memory.h
  runtime/device/event.h
  runtime/device/memory_limit.h
  runtime/device/opened_library.h
  runtime/device/span_clock.h
  runtime/device/stream.h
  runtime/device/stream_priority.h
  runtime/device/thread_limit.h
  runtime/device/thread_team.h
  runtime/engine/engine.h
  runtime/engine/engine_state.h
  runtime/engine/optimizer_spec.h
  runtime/engine/program.h
  runtime/engine/scope.h
  runtime/engine/state_reader.h
  runtime/engine/step.h
  runtime/engine/tensor_axis.h
  runtime/engine/tensor_view.h
  runtime/engine/training_state.h
  runtime/kernels/reduce.h
  runtime/trace/ledger.h
  runtime/trace/log.h
  runtime/trace/resident_set.h
  runtime/trace/standard_streams.h
  runtime/trace/timeline.h
  sharding/mesh.h
  sharding/model.h
  sharding/state.h)

# For a trainer's own code on a GPU, in builds with CUDA: they include CUDA's headers, or are useful only with them.
set(ebb_public_cuda_headers
  runtime/device/cuda/captured_graph.h
  runtime/device/cuda/current_device.h
  runtime/device/cuda/error.h
  runtime/device/cuda/kernel_launch.h
  runtime/device/cuda/kernel_thread.h
  runtime/device/cuda/matrix_thread.h
  runtime/device/cuda/number_bits.h
  runtime/device/cuda/numbers.h)
if(EBB_CUDA)
  list(APPEND ebb_public_headers ${ebb_public_cuda_headers})
endif()
