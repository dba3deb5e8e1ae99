// Turns a failed allocation of C++ into a Status that is a refusal (refusal.h).
#pragma once

#include <new>
#include <utility>

#include "absl/status/status.h"
#include "ops/no_memory.h"
#include "refusal.h"

namespace ebb::gpt {

// `work` returns a Status or a StatusOr.
template <class Work>
auto OrOutOfMemory(Work&& work) -> decltype(work()) {
  try {
    return std::forward<Work>(work)();
  } catch (const std::bad_alloc&) {
    return RefusalByCode(NoMemoryFor("this process"));
  }
}

}  // namespace ebb::gpt
