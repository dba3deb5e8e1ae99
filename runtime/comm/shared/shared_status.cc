#include "ebb/runtime/comm/shared/shared_status.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "ebb/runtime/device/wait_point.h"

namespace ebb {
namespace {

constexpr std::chrono::milliseconds kWritingTakesAtMost{200};
constexpr std::chrono::microseconds kBetweenLooks{50};

}  // namespace

bool SharedStatus::TrySet(const absl::Status& status) {
  uint32_t state = kEmpty;
  if (state_.compare_exchange_strong(state, kBeingSet, std::memory_order_seq_cst)) {
    Write(status);
    return true;
  }
  const WaitPoint::Deadline end = WaitPoint::Clock::now() + kWritingTakesAtMost;
  while (!is_set() && WaitPoint::Clock::now() < end) std::this_thread::sleep_for(kBetweenLooks);
  if (is_set()) return false;
  Write(status);
  return true;
}

void SharedStatus::Write(const absl::Status& status) {
  const size_t bytes = std::min(status.message().size(), kMessageBytesMax - 1);
  std::copy_n(status.message().data(), bytes, message_);
  message_[bytes] = '\0';
  code_ = static_cast<int32_t>(status.code());
  state_.store(kSet, std::memory_order_seq_cst);
}

absl::Status SharedStatus::Get() const {
  if (!is_set()) return absl::OkStatus();
  return absl::Status(static_cast<absl::StatusCode>(code_),
                      absl::string_view(message_, strnlen(message_, kMessageBytesMax)));
}

}  // namespace ebb
