// State in and out, checkpoints, and the tables.
#include "ebb/runtime/c/handles.h"
#include "ebb/runtime/checkpoint/checkpoint_tensors.h"
#include "ebb/runtime/checkpoint/model_files.h"

namespace ebb::c {
namespace {

constexpr char kTrainer[] = "c.trainer", kOfThisRank[] = "c.of_this_rank", kBuffers[] = "c.buffers";

absl::StatusOr<StateClass> ReadableState(int32_t state) {
  if (state < EBB_PARAMETER || state > EBB_OPTIMIZER) {
    return absl::InvalidArgumentError(
        absl::StrCat("state ", state,
                     " cannot be read or written: EBB_PARAMETER, EBB_MASTER, "
                     "EBB_GRADIENT and EBB_OPTIMIZER can"));
  }
  return static_cast<StateClass>(state);
}

auto Into(ebb_sink sink, void* user) {
  return [sink, user](const Slice& slice, std::span<const float> values) -> absl::Status {
    if (sink(user, static_cast<int32_t>(slice.parameter), slice.begin, slice.end, values.data()) !=
        0)
      return absl::AbortedError(absl::StrCat("the sink has failed for ", slice.name));
    return absl::OkStatus();
  };
}

absl::Status AddBytes(const void* bytes, int64_t size, const char* field, const char* key,
                      std::map<std::string, std::string>& to) {
  if (size < 0 || (size > 0 && bytes == nullptr))
    return absl::InvalidArgumentError(
        absl::StrCat(field, "_bytes of ebb_save_options is ", size,
                     size < 0 ? ", below 0" : absl::StrCat(", but ", field, " is null")));
  if (size > 0) to[key] = std::string(static_cast<const char*>(bytes), static_cast<size_t>(size));
  return absl::OkStatus();
}

std::string BytesIn(const std::map<std::string, std::string>& bytes, const char* key) {
  const auto found = bytes.find(key);
  return found == bytes.end() ? std::string() : found->second;
}

}  // namespace
}  // namespace ebb::c

using ebb::c::CallEngine;
using ebb::c::CallLive;

int32_t ebb_read(ebb_engine* handle, int32_t state, const char* name, ebb_sink sink, void* user) {
  return CallEngine(handle, [&](ebb::Engine& engine) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(const ebb::StateClass what, ebb::c::ReadableState(state));
    if (sink == nullptr) return absl::InvalidArgumentError("the sink is null");
    return engine.Read(what, ebb::c::Into(sink, user), ebb::c::TextOr(name, ""));
  });
}

int32_t ebb_write(ebb_engine* handle, int32_t state, const char* name, ebb_fill fill, void* user) {
  return CallEngine(handle, [&](ebb::Engine& engine) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(const ebb::StateClass what, ebb::c::ReadableState(state));
    if (fill == nullptr) return absl::InvalidArgumentError("the source of values is null");
    return engine.Write(what, ebb::c::FromFill(fill, user), ebb::c::TextOr(name, ""));
  });
}

int32_t ebb_read_parameter(ebb_engine* handle, int32_t parameter, int32_t state, const char* name,
                           ebb_sink sink, void* user) {
  return CallEngine(handle, [&](ebb::Engine& engine) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(const ebb::StateClass what, ebb::c::ReadableState(state));
    if (sink == nullptr) return absl::InvalidArgumentError("the sink is null");
    return engine.Read(ebb::ParameterId{parameter}, what, ebb::c::Into(sink, user),
                       ebb::c::TextOr(name, ""));
  });
}

int32_t ebb_write_parameter(ebb_engine* handle, int32_t parameter, int32_t state, const char* name,
                            ebb_fill fill, void* user) {
  return CallEngine(handle, [&](ebb::Engine& engine) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(const ebb::StateClass what, ebb::c::ReadableState(state));
    if (fill == nullptr) return absl::InvalidArgumentError("the source of values is null");
    return engine.Write(ebb::ParameterId{parameter}, what, ebb::c::FromFill(fill, user),
                        ebb::c::TextOr(name, ""));
  });
}

int32_t ebb_gather_state(ebb_engine* handle, int32_t parameter, int32_t state, const char* name,
                         int32_t root, ebb_sink sink, void* user) {
  return CallEngine(handle, [&](ebb::Engine& engine) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(const ebb::StateClass what, ebb::c::ReadableState(state));
    if (sink == nullptr) return absl::InvalidArgumentError("the sink is null");
    return engine.Gather(ebb::ParameterId{parameter}, what, ebb::c::Into(sink, user), root,
                         ebb::c::TextOr(name, ""));
  });
}

int32_t ebb_gather(ebb_engine* handle, int32_t parameter, int32_t state, int32_t root,
                   ebb_sink sink, void* user) {
  return ebb_gather_state(handle, parameter, state, /*name=*/nullptr, root, sink, user);
}

int32_t ebb_save(ebb_engine* handle, const char* folder, const ebb_save_options* given,
                 int64_t* ticket) {
  return CallLive(handle, [&](ebb_engine& engine) -> absl::Status {
    if (folder == nullptr) return absl::InvalidArgumentError("the folder is null");
    EBB_ASSIGN_OR_RETURN(const ebb_save_options options,
                         ebb::c::Taken(given, ebb_save_options{}, "ebb_save_options"));
    ebb::SaveOptions with;
    with.keep = options.keep;
    EBB_RETURN_IF_ERROR(ebb::c::AddBytes(options.trainer, options.trainer_bytes, "trainer",
                                         ebb::c::kTrainer, with.trainer));
    EBB_RETURN_IF_ERROR(ebb::c::AddBytes(options.of_this_rank, options.of_this_rank_bytes,
                                         "of_this_rank", ebb::c::kOfThisRank, with.of_this_rank));
    for (auto* const to : {&with.of_this_rank, &with.trainer})  // the latter for other worlds
      EBB_RETURN_IF_ERROR(ebb::c::AddBytes(options.buffers, options.buffers_bytes, "buffers",
                                           ebb::c::kBuffers, *to));
    if (ticket == nullptr) return ebb::SaveCheckpoint(*engine.engine, folder, with).status();
    EBB_ASSIGN_OR_RETURN(ebb::SaveTicket saving, ebb::SaveAsync(*engine.engine, folder, with));
    engine.tickets.push_back(std::move(saving));
    *ticket = static_cast<int64_t>(engine.tickets.size());
    return absl::OkStatus();
  });
}

int32_t ebb_save_wait(ebb_engine* handle, int64_t ticket, int32_t* done) {
  return CallLive(handle, [&](ebb_engine& engine) -> absl::Status {
    if (ticket < 1 || ticket > static_cast<int64_t>(engine.tickets.size()))
      return absl::InvalidArgumentError(absl::StrCat("there is no save ", ticket));
    const ebb::SaveTicket& saving = engine.tickets[static_cast<size_t>(ticket) - 1];
    if (done != nullptr) {
      *done = saving.Done();
      if (*done == 0) return absl::OkStatus();
    }
    return saving.Wait().status();
  });
}

int32_t ebb_load(ebb_engine* handle, const char* path, ebb_loaded* loaded) {
  return ebb_load_with(handle, path, /*options=*/nullptr, loaded);
}

int32_t ebb_load_with(ebb_engine* handle, const char* path, const ebb_load_options* given,
                      ebb_loaded* loaded) {
  return CallLive(handle, [&](ebb_engine& engine) -> absl::Status {
    if (path == nullptr) return absl::InvalidArgumentError("the path is null");
    EBB_ASSIGN_OR_RETURN(const ebb_load_options options,
                         ebb::c::Taken(given, ebb_load_options{}, "ebb_load_options"));
    if (loaded != nullptr) {
      EBB_RETURN_IF_ERROR(ebb::c::CheckRoom(loaded, "ebb_loaded"));
    }
    EBB_ASSIGN_OR_RETURN(const ebb::LoadedCheckpoint found,
                         ebb::LoadCheckpoint(*engine.engine, path,
                                             {.states = options.without_states == 0,
                                              .partial = options.partial != 0,
                                              .keeps_missing = options.partial != 0,
                                              .advice = ""}));
    engine.trainer = ebb::c::BytesIn(found.trainer, ebb::c::kTrainer);
    engine.of_this_rank = ebb::c::BytesIn(found.of_this_rank, ebb::c::kOfThisRank);
    engine.buffers = ebb::c::BytesIn(
        found.of_this_rank.contains(ebb::c::kBuffers) ? found.of_this_rank : found.trainer,
        ebb::c::kBuffers);
    if (loaded == nullptr) return absl::OkStatus();
    return ebb::c::Give({.struct_size = 0,
                         .ranks = found.ranks,
                         .step = found.state.finished_steps,
                         .trainer = engine.trainer.data(),
                         .trainer_bytes = static_cast<int64_t>(engine.trainer.size()),
                         .of_this_rank = engine.of_this_rank.data(),
                         .of_this_rank_bytes = static_cast<int64_t>(engine.of_this_rank.size()),
                         .buffers = engine.buffers.data(),
                         .buffers_bytes = static_cast<int64_t>(engine.buffers.size())},
                        loaded, "ebb_loaded");
  });
}

int32_t ebb_import_tensors(const char* tensors, const char* folder) {
  return ebb::c::Call([&]() -> absl::Status {
    if (tensors == nullptr || folder == nullptr)
      return absl::InvalidArgumentError("the tensors or the folder are null");
    EBB_ASSIGN_OR_RETURN(const std::unique_ptr<ebb::TensorSource> source,
                         ebb::DescribedTensors(tensors));
    return ebb::ImportCheckpoint(*source, folder, [](int64_t) {}).status();
  });
}

int32_t ebb_memory(ebb_engine* handle, ebb_memory_row* rows, int32_t capacity, int32_t* count) {
  return CallEngine(handle, [&](ebb::Engine& engine) -> absl::Status {
    return ebb::c::GiveRows(ebb::c::RowsOf(engine.memory()), rows, capacity, count);
  });
}

int32_t ebb_traffic(ebb_engine* handle, ebb_traffic_row* rows, int32_t capacity, int32_t* count) {
  return CallEngine(handle, [&](ebb::Engine& engine) -> absl::Status {
    std::vector<ebb_traffic_row> given;
    for (const ebb::TrafficRow& row : engine.traffic()) {
      given.push_back({.state = static_cast<int32_t>(row.state),
                       .tier = static_cast<int32_t>(row.tier),
                       .direction = static_cast<int32_t>(row.direction),
                       .predicted = row.predicted_bytes,
                       .bytes = row.bytes});
    }
    return ebb::c::GiveRows(given, rows, capacity, count);
  });
}

int32_t ebb_communication(ebb_engine* handle, ebb_communication_row* rows, int32_t capacity,
                          int32_t* count) {
  return CallEngine(handle, [&](ebb::Engine& engine) -> absl::Status {
    std::vector<ebb_communication_row> given;
    for (const ebb::CommunicationRow& row : engine.communication()) {
      ebb_communication_row& to = given.emplace_back();
      row.operation.copy(to.operation, sizeof to.operation - 1);
      to.predicted = row.predicted_bytes;
      to.bytes = row.bytes;
    }
    return ebb::c::GiveRows(given, rows, capacity, count);
  });
}
