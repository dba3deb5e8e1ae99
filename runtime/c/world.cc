// The library itself, and the world.
#include "ebb/runtime/c/handles.h"
#include "ebb/runtime/trace/log.h"

namespace ebb::c {
namespace {

thread_local std::string last_error;

}  // namespace

void SetError(absl::string_view text) noexcept {
  try {
    last_error.assign(text.data(), text.size());
  } catch (...) {
    last_error = "out of memory";  // short enough to lie in the string itself
  }
}

void Handles::Add(const void* handle) {
  const std::lock_guard lock(mutex_);
  live_.insert(handle);
}
bool Handles::Remove(const void* handle) {
  const std::lock_guard lock(mutex_);
  return live_.erase(handle) > 0;
}
absl::Status Handles::Check(const void* handle) const {
  const std::string kind(kind_);
  if (handle == nullptr) return absl::InvalidArgumentError(absl::StrCat("the ", kind, " is null"));
  const std::lock_guard lock(mutex_);
  if (live_.contains(handle)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("there is no such ", kind, ": the handle is unknown, or destroyed"));
}

// Never destroyed: a thread of the caller's may still ask while the process ends.
Handles& Worlds() {
  static Handles& handles = *new Handles("world");
  return handles;
}
Handles& Models() {
  static Handles& handles = *new Handles("model");
  return handles;
}
Handles& Engines() {
  static Handles& handles = *new Handles("engine");
  return handles;
}

absl::Status GiveText(std::string_view text, char* to, size_t capacity, size_t* needed) {
  if (needed != nullptr) *needed = text.size() + 1;
  if (to == nullptr && capacity == 0 && needed != nullptr) return absl::OkStatus();
  if (to == nullptr) return absl::InvalidArgumentError("the pointer to the text is null");
  if (capacity <= text.size()) {
    if (capacity > 0) to[0] = 0;
    return absl::OutOfRangeError(
        absl::StrCat("the text has ", text.size() + 1, " bytes, but capacity is ", capacity));
  }
  std::memcpy(to, text.data(), text.size());
  to[text.size()] = 0;
  return absl::OkStatus();
}

absl::StatusOr<Config> ReadConfig(const char* json, int world) {
  if (json == nullptr) return absl::InvalidArgumentError("the configuration is null");
  ReadOptions options;
  if (world > 0) options.world = [world](const Config&) { return world; };
  return Config::FromJson(json, options);
}

}  // namespace ebb::c

using ebb::c::Call;

uint32_t ebb_abi(void) {
  return EBB_ABI;
}
const char* ebb_version(void) {
  return EBB_VERSION;
}
const char* ebb_error(void) {
  return ebb::c::last_error.c_str();
}

void ebb_log_to(ebb_log log, void* user) {
  Call([&] {
    if (log == nullptr) {
      ebb::SendLogTo({});
      return absl::OkStatus();
    }
    ebb::SendLogTo([log, user](ebb::LogLevel level, std::string_view message) {
      log(user, level == ebb::LogLevel::kWarning ? EBB_LOG_WARNING : EBB_LOG_INFO,
          std::string(message).c_str());
    });
    return absl::OkStatus();
  });
}

int32_t ebb_config_resolve(const char* json, int32_t world, char* text, size_t capacity,
                           size_t* needed) {
  return Call([&]() -> absl::Status {
    EBB_ASSIGN_OR_RETURN(const ebb::Config config, ebb::c::ReadConfig(json, world));
    EBB_ASSIGN_OR_RETURN(const ebb::Config resolved, config.ForWorld(world));
    return ebb::c::GiveText(resolved.ToJson(), text, capacity, needed);
  });
}

int32_t ebb_world_open(const ebb_world_options* given, ebb_world** world) {
  return Call([&]() -> absl::Status {
    if (world == nullptr) return absl::InvalidArgumentError("the pointer to the world is null");
    EBB_ASSIGN_OR_RETURN(const ebb_world_options options,
                         ebb::c::Taken(given, ebb_world_options{}, "ebb_world_options"));
    ebb::WorldOptions with;
    if (options.timeout_seconds != 0) with.timeout_seconds = options.timeout_seconds;
    EBB_ASSIGN_OR_RETURN(ebb::World opened, ebb::World::FromEnvironment(with));
    *world = new ebb_world{std::move(opened)};
    ebb::c::Worlds().Add(*world);
    return absl::OkStatus();
  });
}

void ebb_world_close(ebb_world* world) {
  Call([&] {
    if (ebb::c::Worlds().Remove(world)) delete world;
    return absl::OkStatus();
  });
}

int32_t ebb_world_describe(const ebb_world* world, ebb_world_facts* facts) {
  return Call([&]() -> absl::Status {
    EBB_RETURN_IF_ERROR(ebb::c::Worlds().Check(world));
    const ebb::World& of = world->world;
    return ebb::c::Give({.struct_size = 0,
                         .rank = of.rank(),
                         .size = of.size(),
                         .local_rank = of.local_rank(),
                         .local_size = of.local_size()},
                        facts, "ebb_world_facts");
  });
}

int32_t ebb_world_fail(ebb_world* world, const char* why) {
  return Call([&]() -> absl::Status {
    EBB_RETURN_IF_ERROR(ebb::c::Worlds().Check(world));
    world->world.Fail(absl::AbortedError(ebb::c::TextOr(why, "a rank has given up")));
    return absl::OkStatus();
  });
}
