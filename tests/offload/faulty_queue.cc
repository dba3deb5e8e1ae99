#include "faulty_queue.h"

#include <utility>

namespace ebb::testing {

FaultyQueue::FaultyQueue(IoListener& listener, Fault fault, size_t hold, bool own_thread)
    : listener_(listener), fault_(std::move(fault)), hold_(hold) {
  if (own_thread) answerer_ = std::thread([this] { Answer(); });
}

FaultyQueue::~FaultyQueue() {
  {
    // The listener submits more when it gets an answer, so an answer may come before Submit has
    // returned.
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return answers_.empty() && !answering_; });
  }
  inner_.reset();
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (answerer_.joinable()) answerer_.join();
}

absl::Status FaultyQueue::Make(const ShardFile::Options::MakeQueue& make) {
  auto made = make(*this);
  if (made.ok()) {
    inner_ = *std::move(made);
    serving_ = inner_.get();
  }
  return made.status();
}

void FaultyQueue::Submit(std::span<IoRequest* const> requests) {
  std::vector<IoRequest*> through;
  {
    const std::lock_guard lock(mutex_);
    in_flight_ += requests.size();
    for (IoRequest* request : requests) {
      const int64_t bytes = request->bytes;
      if (const std::optional<int64_t> answer = fault_(*request)) {
        answers_.push_back({request, *answer});
        continue;
      }
      if (request->bytes != bytes) whole_bytes_[request] = bytes;
      through.push_back(request);
    }
  }
  changed_.notify_all();
  serving_->Submit(through);
}

void FaultyQueue::Completed(std::span<const IoCompletion> completions) {
  Complete({completions.begin(), completions.end()});
}

void FaultyQueue::Answer() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return stopping_ || !answers_.empty(); });
    if (!GiveAnswers(lock)) return;
  }
}

// False: there are none.
bool FaultyQueue::GiveAnswers(std::unique_lock<std::mutex>& lock) {
  if (answers_.empty()) return false;
  std::vector<IoCompletion> answers = std::exchange(answers_, {});
  answering_ = true;
  lock.unlock();
  Complete(std::move(answers));
  listener_.Announce();
  lock.lock();
  answering_ = false;
  changed_.notify_all();
  return true;
}

bool FaultyQueue::Drive() {
  if (!answerer_.joinable()) {
    std::unique_lock lock(mutex_);
    if (GiveAnswers(lock)) return true;
  }
  return serving_->Drive();
}

void FaultyQueue::Complete(std::vector<IoCompletion> completions) {
  std::vector<IoCompletion> due;
  {
    const std::lock_guard lock(mutex_);
    for (const IoCompletion& completion : completions) {
      if (const auto whole = whole_bytes_.find(completion.request); whole != whole_bytes_.end()) {
        completion.request->bytes = whole->second;
        whole_bytes_.erase(whole);
      }
      held_.insert(held_.begin(), completion);
    }
    if (held_.size() >= hold_ || (hold_ == kAllInFlight && held_.size() == in_flight_)) {
      in_flight_ -= held_.size();
      due = std::exchange(held_, {});
    }
  }
  if (!due.empty()) listener_.Completed(due);
}

}  // namespace ebb::testing
