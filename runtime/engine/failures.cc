#include "ebb/runtime/engine/failures.h"

#include <utility>

namespace ebb {

void Failures::Fail(absl::Status status) {
  const std::lock_guard lock(mutex_);
  if (failed_.ok()) failed_ = std::move(status);
}

bool Failures::has_failed() const {
  const std::lock_guard lock(mutex_);
  return !failed_.ok();
}

absl::Status Failures::failure() const {
  const std::lock_guard lock(mutex_);
  return failed_;
}

absl::Status Failures::Tell() const {
  const std::lock_guard lock(mutex_);
  told_ = told_ || !failed_.ok();
  return failed_;
}

absl::Status Failures::Untold() const {
  const std::lock_guard lock(mutex_);
  return told_ ? absl::OkStatus() : failed_;
}

bool Failures::NoteBroken(const absl::Status& broken, std::string where) {
  const std::lock_guard lock(mutex_);
  if (!broken_.ok()) return false;
  broken_ = broken;
  broken_at_ = std::move(where);
  return true;
}

absl::Status Failures::broken() const {
  const std::lock_guard lock(mutex_);
  return broken_;
}

std::string Failures::WhereBroken(const absl::Status& broken) const {
  const std::lock_guard lock(mutex_);
  return broken == broken_ ? broken_at_ : "";
}

}  // namespace ebb
