// The helpers of every function of ebb.h: checks of handles, structs that may be older or newer
// than this library, and the conversion of errors to a code and a text of the calling thread.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "ebb/ebb.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/c/ebb.h"
#include "ebb/runtime/checkpoint/tensor_source.h"

struct ebb_world {
  ebb::World world;
};
struct ebb_model {
  ebb::ModelSpec spec;
  struct Files {  // of one path; Read is called by one thread at a time
    std::unique_ptr<ebb::TensorSource> source;
    std::map<std::string, size_t> tensor_of_name;
    std::mutex mutex;
  };
  std::map<std::string, std::shared_ptr<Files>> files;  // by path
};
struct ebb_engine {
  std::optional<ebb::Engine> engine;
  std::shared_ptr<void> memory;  // of an engine that was closed
  std::optional<ebb::Step> step;
  std::optional<ebb::Evaluation> evaluation;
  using Scope = std::variant<ebb::ForwardScope, ebb::BackwardScope>;
  struct OpenScope {
    int64_t id = 0;
    ebb::UnitId unit{};
    Scope scope;
  };
  std::vector<OpenScope> scopes;
  int64_t last_scope = 0;
  std::vector<ebb::SaveTicket> tickets;
  std::string trainer, of_this_rank, buffers;  // that the last ebb_load has found

  void DropSteps() {
    scopes.clear();
    evaluation.reset();
    step.reset();
  }
};

namespace ebb::c {

// The text is shorter where there is no memory for it.
void SetError(absl::string_view text) noexcept;

// Runs `body`, which returns a Status, as the inside of a function of ebb.h.
template <class Body>
int32_t Call(Body&& body) noexcept {
  try {
    const absl::Status status = body();
    if (!status.ok()) SetError(status.message());
    return static_cast<int32_t>(status.raw_code());
  } catch (const std::bad_alloc&) {
    SetError("the host is out of memory");
    return EBB_RESOURCE_EXHAUSTED;
  } catch (const std::exception& exception) {
    SetError(exception.what());
  } catch (...) {
    SetError("an exception that is no std::exception");
  }
  return EBB_INTERNAL;
}
// Call for a `body` that returns an id.
template <class Body>
int32_t CallForId(Body&& body) noexcept {
  int32_t id = -1;
  const int32_t code = Call([&]() -> absl::Status {
    EBB_ASSIGN_OR_RETURN(id, body());
    return absl::OkStatus();
  });
  return code == 0 ? id : -1;
}

// The handles that were given out and not taken back.
class Handles {
 public:
  explicit Handles(std::string_view kind) : kind_(kind) {}

  void Add(const void* handle);
  bool Remove(const void* handle);
  absl::Status Check(const void* handle) const;

 private:
  const std::string_view kind_;
  mutable std::mutex mutex_;
  std::unordered_set<const void*> live_;
};
Handles& Worlds();
Handles& Models();
Handles& Engines();

// The handle is of an engine that was not closed.
absl::Status CheckLive(const ebb_engine* handle);
// Call for a `body` that takes the handle of such an engine, or the engine.
template <class Body>
int32_t CallLive(ebb_engine* handle, Body&& body) noexcept {
  return Call([&]() -> absl::Status {
    EBB_RETURN_IF_ERROR(CheckLive(handle));
    return body(*handle);
  });
}
template <class Body>
int32_t CallEngine(ebb_engine* handle, Body&& body) noexcept {
  return CallLive(handle, [&](ebb_engine& live) { return body(*live.engine); });
}

// Copies the fields that the caller's struct and this library's share. Fields of a newer caller
// behind these must be 0.
template <class T>
absl::StatusOr<T> Taken(const T* given, T defaults, std::string_view what) {
  if (given == nullptr) return defaults;
  const uint32_t size = given->struct_size;
  if (size < sizeof(uint32_t) || size > 4096) {
    return absl::InvalidArgumentError(absl::StrCat("struct_size of ", std::string(what), " is ",
                                                   size, ": set it to the sizeof of the struct"));
  }
  const auto* const bytes = reinterpret_cast<const unsigned char*>(given);
  if (size > sizeof(T) &&
      std::any_of(bytes + sizeof(T), bytes + size, [](unsigned char byte) { return byte != 0; })) {
    return absl::UnimplementedError(absl::StrCat(
        std::string(what), " has fields that this library does not know, and they are set"));
  }
  std::memcpy(&defaults, given, std::min<size_t>(size, sizeof(T)));
  return defaults;
}
// The elements of an array of the caller's structs: all of one size, which is how far apart they
// are.
template <class T>
absl::StatusOr<std::vector<const T*>> Elements(const T* first, int32_t count,
                                               std::string_view what) {
  if (count < 0 || (count > 0 && first == nullptr))
    return absl::InvalidArgumentError(absl::StrCat(
        "the array of ", std::string(what),
        count < 0 ? " has a number below 0: " : " is null, but its number is ", count));
  std::vector<const T*> elements;
  const auto* at = reinterpret_cast<const unsigned char*>(first);
  for (int32_t i = 0; i < count; ++i) {
    const auto* const element = reinterpret_cast<const T*>(at);
    if (element->struct_size != first->struct_size || element->struct_size % alignof(T) != 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("struct_size of ", std::string(what), " ", i, " is ", element->struct_size,
                       ", and of the first ", first->struct_size, ": set each to the sizeof"));
    }
    elements.push_back(element);
    at += first->struct_size;
  }
  return elements;
}

template <class T>
absl::Status CheckRoom(const T* to, std::string_view what) {
  if (to == nullptr || to->struct_size < sizeof(uint32_t) || to->struct_size > 4096) {
    return absl::InvalidArgumentError(
        absl::StrCat(std::string(what), " is null, or its struct_size is not set"));
  }
  return absl::OkStatus();
}
// Members that a newer caller has behind this library's struct become 0.
template <class T>
absl::Status Give(T value, T* to, std::string_view what) {
  EBB_RETURN_IF_ERROR(CheckRoom(to, what));
  const uint32_t size = to->struct_size;
  value.struct_size = size;
  std::memcpy(to, &value, std::min<size_t>(size, sizeof(T)));
  if (size > sizeof(T))
    std::memset(reinterpret_cast<unsigned char*>(to) + sizeof(T), 0, size - sizeof(T));
  return absl::OkStatus();
}

absl::Status GiveText(std::string_view text, char* to, size_t capacity, size_t* needed);
template <class Row>
absl::Status GiveRows(const std::vector<Row>& rows, Row* to, int32_t capacity, int32_t* count) {
  if (count == nullptr || capacity < 0 || (capacity > 0 && to == nullptr))
    return absl::InvalidArgumentError("rows or their number are null, or the capacity is negative");
  *count = static_cast<int32_t>(rows.size());
  std::copy_n(rows.begin(), std::min<size_t>(rows.size(), static_cast<size_t>(capacity)), to);
  return absl::OkStatus();
}
inline std::string TextOr(const char* text, const char* otherwise) {
  return text == nullptr ? otherwise : text;
}

Initialiser FromFill(ebb_fill fill, void* user);
absl::Status CheckDType(std::string_view field, int32_t dtype);
absl::StatusOr<Visit> VisitOf(const ebb_visit* given);
absl::StatusOr<std::vector<ScopeEvent>> OrderOf(const ebb_event* events, int32_t count);
// `world`: the number of ranks, or 0 if it is not known yet.
absl::StatusOr<Config> ReadConfig(const char* json, int world = 0);
std::vector<ebb_memory_row> RowsOf(const std::vector<MemoryRow>& rows);

}  // namespace ebb::c
