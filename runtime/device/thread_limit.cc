#include "ebb/runtime/device/thread_limit.h"

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"

namespace ebb {
namespace {

constexpr char kMark[] = "ebb/no_thread";

}  // namespace

absl::Status NoThread(std::string_view what, const std::system_error& error,
                      std::string_view remedy) {
  const auto text = [](std::string_view view) {
    return absl::string_view(view.data(), view.size());
  };
  absl::Status status = absl::ResourceExhaustedError(
      absl::StrCat(text(what), ": ", error.what(),
                   "; raise the limit of processes and threads (ulimit -u, pids of ",
                   "the container), ", text(remedy), "or run fewer ranks on this host"));
  status.SetPayload(kMark, absl::Cord());
  return status;
}

bool IsNoThread(const absl::Status& status) {
  return status.GetPayload(kMark).has_value();
}

}  // namespace ebb
