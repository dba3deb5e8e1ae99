#include "refusal.h"

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "ebb/runtime/device/thread_limit.h"
#include "ops/no_memory.h"

namespace ebb::gpt {
namespace {

constexpr char kMark[] = "ebb.gpt/refusal";

}  // namespace

absl::Status RefusalByCode(absl::Status error) {
  switch (error.code()) {
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kNotFound:
    case absl::StatusCode::kAlreadyExists:
    case absl::StatusCode::kPermissionDenied:
    case absl::StatusCode::kResourceExhausted:
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kUnimplemented:
    case absl::StatusCode::kDataLoss:
      error.SetPayload(kMark, absl::Cord());
      break;
    default:
      break;
  }
  return error;
}

absl::Status AllOf(const std::vector<absl::Status>& errors) {
  absl::Status all;
  for (const absl::Status& error : errors) {
    if (error.ok()) continue;
    all = all.ok()
              ? error
              : absl::Status(all.code(), absl::StrCat(all.message(), "\ngpt: ", error.message()));
  }
  return all;
}

bool IsRefusal(const absl::Status& error) {
  return error.GetPayload(kMark).has_value() || IsNoThread(error) || IsNoMemory(error);
}

}  // namespace ebb::gpt
