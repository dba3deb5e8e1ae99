// What has failed for good: the engine, and before it perhaps a communicator. Any thread may say so, in
// whichever order; the first to do so is the cause, since others fail in its wake.
#pragma once

#include <mutex>
#include <string>

#include "absl/status/status.h"

namespace ebb {

class Failures {
 public:
  void Fail(absl::Status status);
  bool has_failed() const;
  // OK where there is none.
  absl::Status failure() const;
  // The failure, for a caller of the trainer's, who hears of it now.
  absl::Status Tell() const;
  // The failure that no caller has heard of.
  absl::Status Untold() const;

  // What a communicator was seen to have failed with, and at which operation; empty: unknown. False if
  // one was seen before.
  bool NoteBroken(const absl::Status& broken, std::string where);
  absl::Status broken() const;
  // Empty also where `broken` is not what was seen.
  std::string WhereBroken(const absl::Status& broken) const;

 private:
  mutable std::mutex mutex_;
  absl::Status failed_;
  mutable bool told_ = false;
  absl::Status broken_;
  std::string broken_at_;
};

}  // namespace ebb
