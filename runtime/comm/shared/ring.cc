#include "ebb/runtime/comm/shared/ring.h"

#include <algorithm>

namespace ebb {
namespace {

// An exchange uses two slots, because the others may still be reading the slots of this rank's last
// two meetings.
constexpr uint64_t kSlotsOfExchange = 2;

}  // namespace

int64_t SharedRing::slot_bytes(bool same_for_all) const {
  constexpr int64_t kLine = 64;
  return same_for_all ? group_.slot_bytes() : group_.slot_bytes() / group_.size() / kLine * kLine;
}

const std::byte* SharedRing::Received(int peer, int64_t step) const {
  const auto s = static_cast<uint64_t>(step);
  if (exchanges_)
    return group_.slot(peer, group_.record(peer).post_meeting + 1 + s % kSlotsOfExchange);
  return group_.slot(peer, first_ + s) + (same_for_all_ ? 0 : group_.rank() * slot_bytes(false));
}

bool SharedRing::Run(const Collective& call, const Load& load, WaitPoint::Deadline deadline) {
  exchanges_ = IsPointToPoint(call.kind);
  if (exchanges_) return RunExchange(load, call.peer, call.kind == CollectiveKind::kSend, deadline);
  same_for_all_ = load.same_for_all;
  first_ = group_.next();
  // Ranks with nothing to move still come to one meeting.
  const int64_t steps = std::max<int64_t>(load.steps, is_checked_ ? 0 : 1);
  for (int64_t step = 0; step <= steps; ++step) {
    if (step < steps) {
      const uint64_t meeting = group_.next();
      std::byte* const slot = group_.slot(group_.rank(), meeting);
      for (int peer = 0; peer < group_.size() && step < load.steps; ++peer) {
        if (peer == group_.rank() || load.sent_bytes(peer, step) == 0) continue;
        load.fill(peer, step, slot + (same_for_all_ ? 0 : peer * slot_bytes(false)));
        if (same_for_all_) break;
      }
      if (step == 0) {
        group_.call(group_.rank(), meeting) = {.summary = *call_, .spans = nullptr, .readable = 0};
      }
      group_.Arrive();
    }
    if (step == 0) continue;
    const uint64_t meeting = first_ + static_cast<uint64_t>(step) - 1;
    if (!group_.Await(meeting, *call_, deadline)) return false;
    if (!is_checked_ && !group_.AllCalledTheSame(meeting)) return false;
    is_checked_ = true;
    if (step <= load.steps) load.consume(step - 1);
  }
  return true;
}

bool SharedRing::RunExchange(const Load& load, int peer, bool sends, WaitPoint::Deadline deadline) {
  shared::RankRecord &mine = group_.mine(), &other = group_.record(peer);
  for (int64_t step = 0; step < load.steps; ++step) {
    if (sends) {
      if (!group_.AwaitPeer(*call_, deadline, [&] {
            return mine.taken.load() + static_cast<int64_t>(kSlotsOfExchange) > step;
          }))
        return false;
      load.fill(peer, step,
                group_.slot(group_.rank(), mine.post_meeting + 1 +
                                               static_cast<uint64_t>(step) % kSlotsOfExchange));
      mine.sent.store(step + 1);
    } else {
      if (!group_.AwaitPeer(*call_, deadline, [&] { return other.sent.load() > step; }))
        return false;
      load.consume(step);
      other.taken.store(step + 1);
    }
    group_.Wake();
  }
  return true;
}

}  // namespace ebb
