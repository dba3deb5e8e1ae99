// Errors that refuse what the user asked for. For these gpt exits with 2, and for errors of a run
// with 1. A refusal carries a mark, because both kinds of errors have the same status codes.
#pragma once

#include <new>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "ops/no_memory.h"

namespace ebb::gpt {

// For an error before training: marked if its code says that a request cannot be met here (a cap, a
// folder, a device, a port, a file that is no checkpoint). Unchanged if a rank was lost or a device failed.
absl::Status RefusalByCode(absl::Status error);

// All of the errors as one, a line each, so that they can be mended together; OK without any.
absl::Status AllOf(const std::vector<absl::Status>& errors);

// Marked errors; and, at any time, errors of a machine that grants no thread or has no memory.
bool IsRefusal(const absl::Status& error);

// Turns a failed allocation of C++ in `work` into a refusal. `work` returns a Status or a StatusOr.
template <class Work>
auto OrOutOfMemory(Work&& work) -> decltype(work()) {
  try {
    return std::forward<Work>(work)();
  } catch (const std::bad_alloc&) {
    return RefusalByCode(NoMemoryFor("this process"));
  }
}

}  // namespace ebb::gpt
