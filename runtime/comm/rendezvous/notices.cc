#include "ebb/runtime/comm/rendezvous/notices.h"

#include <utility>

namespace ebb {

void CommunicatorNotices::Fail(const absl::Status& why) {
  {
    const std::scoped_lock lock(mutex_);
    failure_.Update(why);
    failed_.store(!failure_.ok(), std::memory_order_release);
  }
  changed_.Notify();
}

absl::Status CommunicatorNotices::failure() const {
  if (!failed()) return absl::OkStatus();
  const std::scoped_lock lock(mutex_);
  return failure_;
}

std::optional<Departure> CommunicatorNotices::FirstDeparture() const {
  const std::scoped_lock lock(mutex_);
  return departures_.empty() ? std::nullopt : std::optional(departures_.front());
}

uint64_t CommunicatorNotices::CallsOf(int rank, int other) const {
  if (!has_departures_.load(std::memory_order_acquire)) return kStillHere;
  const std::scoped_lock lock(mutex_);
  for (const Departure& departure : departures_) {
    if (departure.rank != rank) continue;
    uint64_t calls = departure.calls;
    for (size_t i = 0; i + 1 < departure.exchanges.size(); i += 2) {
      if (departure.exchanges[i] == static_cast<uint64_t>(other))
        calls += departure.exchanges[i + 1];
    }
    return calls;
  }
  return kStillHere;
}

int CommunicatorNotices::Depart(Departure departure) {
  const std::scoped_lock lock(mutex_);
  departures_.push_back(std::move(departure));
  has_departures_.store(true, std::memory_order_release);
  return static_cast<int>(departures_.size());
}

std::shared_ptr<CommunicatorNotices> Notices::Of(const std::string& name) {
  const std::scoped_lock lock(mutex_);
  std::shared_ptr<CommunicatorNotices>& notices = known_[name];
  if (notices == nullptr) {
    notices = std::make_shared<CommunicatorNotices>();
    notices->Fail(failure_);
  }
  return notices;
}

void Notices::Depart(const std::string& name, int size, Departure departure) {
  const std::shared_ptr<CommunicatorNotices> notices = Of(name);
  const std::scoped_lock lock(mutex_);
  if (notices->Depart(std::move(departure)) < size) return;
  known_.erase(name);
  std::erase_if(left_by_all_, [](const auto& old) { return old.expired(); });
  left_by_all_.push_back(notices);
}

void Notices::FailAll(const absl::Status& why) {
  const std::scoped_lock lock(mutex_);
  failure_.Update(why);
  for (const auto& [name, notices] : known_) notices->Fail(why);
  for (const auto& left : left_by_all_) {
    if (const auto notices = left.lock()) notices->Fail(why);
  }
}

size_t Notices::known() {
  const std::scoped_lock lock(mutex_);
  return known_.size();
}

}  // namespace ebb
