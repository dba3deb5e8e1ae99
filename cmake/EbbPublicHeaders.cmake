# The public headers: what a project that links Ebb may include, what is installed, and what must compile alone
# (tests/headers). The rule: a header is public if and only if it is in this list, and a public header includes no
# internal one, nor any of CUDA, NCCL, MPI or liburing. Public is what ebb/ebb.h includes, what brings a backend, and what
# shows the plan or computes as the engine does. All other headers may change without notice.
set(ebb_public_headers
  ebb.h
  optim/cast.h
  optim/loss_scaler.h
  optim/norm.h
  optim/schedule.h
  optim/update.h
  runtime/comm/backend.h
  runtime/comm/collective.h
  runtime/comm/communicator.h
  runtime/comm/launch/launch.h
  runtime/comm/reduce.h
  runtime/comm/rendezvous/meeting_place.h
  runtime/comm/world.h
  runtime/config/config.h
  runtime/config/dtype.h
  runtime/config/keys.h
  runtime/config/tier.h
  runtime/device/backend.h
  runtime/device/buffer.h
  runtime/device/device.h
  runtime/device/event.h
  runtime/device/stream.h
  runtime/device/thread_team.h
  runtime/engine/engine.h
  runtime/engine/optimizer_spec.h
  runtime/engine/scope.h
  runtime/engine/step.h
  runtime/engine/tensor_view.h
  runtime/trace/ledger.h
  runtime/trace/log.h
  runtime/trace/timeline.h
  sharding/interval.h
  sharding/layout.h
  sharding/memory_model.h
  sharding/model.h
  sharding/partition.h
  sharding/plan.h
  sharding/plan_table.h
  sharding/scopes.h
  sharding/state.h)
