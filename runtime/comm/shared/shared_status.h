// A Status in shared memory. The first rank to fail sets it, and all others read it. Zeros mean OK.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"

namespace ebb {

class SharedStatus {
 public:
  static constexpr size_t kMessageBytesMax = 2040;  // longer messages are truncated

  // False: another process was first; its status can be read when this returns. Processes may be
  // killed at any point: if one has begun to set it and does not finish in time, the next one sets
  // it.
  bool TrySet(const absl::Status& status);
  bool is_set() const { return state_.load(std::memory_order_seq_cst) == kSet; }
  // OK while nothing is set.
  absl::Status Get() const;

 private:
  static constexpr uint32_t kEmpty = 0, kBeingSet = 1, kSet = 2;

  void Write(const absl::Status& status);

  std::atomic<uint32_t> state_;
  int32_t code_;
  char message_[kMessageBytesMax];
};

}  // namespace ebb
