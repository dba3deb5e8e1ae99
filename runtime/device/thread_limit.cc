#include "ebb/runtime/device/thread_limit.h"

#include <pthread.h>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "ebb/runtime/device/memory_limit.h"

namespace ebb {
namespace {

constexpr char kMark[] = "ebb/no_thread";

// A thread's stack is memory of the process.
std::string LimitOfStacks() {
  constexpr int64_t kBesideStack = int64_t{1} << 20;  // guard, and what the thread allocates first
  pthread_attr_t attributes;
  size_t stack = 0;
  if (pthread_getattr_default_np(&attributes) != 0) return "";
  pthread_attr_getstacksize(&attributes, &stack);
  pthread_attr_destroy(&attributes);
  return MemoryLimitBelow(static_cast<int64_t>(stack) + kBesideStack);
}

}  // namespace

absl::Status NoThread(std::string_view what, const std::system_error& error,
                      std::string_view remedy) {
  const auto text = [](std::string_view view) {
    return absl::string_view(view.data(), view.size());
  };
  std::string limit = LimitOfStacks();
  if (limit.empty()) limit = "processes and threads (ulimit -u, pids of the container)";
  absl::Status status = absl::ResourceExhaustedError(
      absl::StrCat(text(what), ": ", error.what(), "; raise the limit of ", limit, ", ",
                   text(remedy), "or run fewer ranks on this host"));
  status.SetPayload(kMark, absl::Cord());
  return status;
}

bool IsNoThread(const absl::Status& status) {
  return status.GetPayload(kMark).has_value();
}

}  // namespace ebb
