#include "ebb/runtime/comm/nccl/shared_failure.h"

namespace ebb {

std::shared_ptr<SharedFailure> SharedFailure::Between(std::shared_ptr<Bootstrap> bootstrap) {
  std::shared_ptr<SharedFailure> shared(new SharedFailure(std::move(bootstrap)));
  // The bootstrap may live on, and hear something, when the world is gone.
  shared->bootstrap_->OnFailure([weak = std::weak_ptr(shared)](const absl::Status& why) {
    if (const auto alive = weak.lock()) alive->FailAll(why);
  });
  return shared;
}

void SharedFailure::Join(const std::shared_ptr<NcclChannel>& channel) {
  {
    const std::scoped_lock lock(mutex_);
    if (status_.ok()) {
      std::erase_if(channels_, [](const auto& old) { return old.expired(); });
      channels_.push_back(channel);
      return;
    }
  }
  channel->Fail(status());
}

void SharedFailure::Report(const absl::Status& why) {
  if (FailAll(why)) bootstrap_->Fail(why);
}

bool SharedFailure::FailAll(const absl::Status& why) {
  std::vector<std::weak_ptr<NcclChannel>> channels;
  {
    const std::scoped_lock lock(mutex_);
    if (!status_.ok()) return false;
    status_ = why;
    channels = channels_;
  }
  for (const auto& weak : channels) {
    if (const auto channel = weak.lock()) channel->Fail(why);
  }
  return true;
}

absl::Status SharedFailure::status() const {
  const std::scoped_lock lock(mutex_);
  return status_;
}

}  // namespace ebb
