#include "ebb/runtime/comm/hosts/star.h"

#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/comm/grouping.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/device/thread_limit.h"

namespace ebb {
namespace {

// Every rank's thread reads whatever comes: a rank that takes nothing for so long has ended or is stuck.
constexpr std::chrono::milliseconds kSendPatience{500};
// Others wait a little longer than rank 0 does, so that they hear from it which rank is missing.
constexpr double kGraceSeconds = 1;

WaitPoint::Deadline Soon() {
  return WaitPoint::Clock::now() + kSendPatience;
}

void Wake(const Descriptor& event) {
  const uint64_t one = 1;
  // An eventfd takes what fits its counter.
  [[maybe_unused]] const ssize_t written = write(event.get(), &one, sizeof(one));
}

void Rest(const Descriptor& event) {
  uint64_t wakes = 0;
  [[maybe_unused]] const ssize_t bytes = read(event.get(), &wakes, sizeof(wakes));
}

}  // namespace

absl::StatusOr<std::shared_ptr<Star>> Star::Hold(int rank, Rendezvous rendezvous) {
  std::shared_ptr<Star> star(new Star(rank, std::move(rendezvous)));
  if (!star->wake_.is_open())
    return absl::ResourceExhaustedError(absl::StrCat("eventfd: ", std::strerror(errno)));
  try {
    star->thread_ = std::thread([star] { star->Run(); });
  } catch (const std::system_error& error) {
    return NoThread("no thread to hear the other ranks", error);
  }
  pthread_setname_np(star->thread_.native_handle(), "ebb-star");
  return star;
}

Star::Star(int rank, Rendezvous rendezvous)
    : rank_(rank),
      participants_(rendezvous.participants()),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      notes_(std::make_shared<FarewellNotes>([this](std::string_view note) {
        const std::scoped_lock lock(mutex_);
        TellOthers(MessageType::kNote, note, rank_);
      })),
      calls_(rank, std::vector<CallRecord*>(participants_.size())),
      connections_(std::move(rendezvous).TakeConnections()),
      has_left_(participants_.size()),
      texts_(participants_.size()) {}

void Star::Stop() {
  {
    const std::scoped_lock lock(mutex_);
    stopping_ = true;
  }
  Wake(wake_);
  if (thread_.get_id() == std::this_thread::get_id()) {
    thread_.detach();  // a listener has ended the world
  } else {
    thread_.join();
  }
}

void Star::Run() {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    if (std::exchange(to_tell_, false)) {
      const std::vector<Heard> listeners = std::exchange(listeners_, {});
      const absl::Status why = failure_;
      lock.unlock();
      for (const Heard& heard : listeners) heard(why);
      lock.lock();
      continue;
    }
    polled_.assign(1, {.fd = wake_.get(), .events = POLLIN, .revents = 0});
    for (const Connection& connection : connections_)  // -1 is passed over
      polled_.push_back({.fd = connection.fd(), .events = POLLIN, .revents = 0});
    constexpr int kSliceMilliseconds = 60'000;
    const WaitPoint::Deadline next = notice_.has_value() ? std::min(due_, notice_->due()) : due_;
    const int wait = PollMilliseconds(next, kSliceMilliseconds);
    lock.unlock();
    const int ready = poll(polled_.data(), polled_.size(), wait);
    lock.lock();
    if (ready > 0 && polled_[0].revents != 0) Rest(wake_);
    for (size_t i = 0; ready > 0 && i < connections_.size(); ++i) {
      if (polled_[1 + i].revents != 0) Hear(i);
    }
    if (!calls_to_hear_.empty()) {
      const std::vector<std::string> packed = std::exchange(calls_to_hear_, {});
      absl::Status apart;
      lock.unlock();  // of many ranks, comparing takes a while
      for (const std::string& text : packed) apart.Update(calls_.Hear(text));
      lock.lock();
      Broken(std::move(apart), rank_);
    }
    if (due_ == WaitPoint::kNever) notice_.reset();
    if (notice_.has_value()) {
      if (const std::optional<double> seconds = notice_->Take()) SayWaiting(*seconds);
    }
    if (due_ != WaitPoint::kNever && WaitPoint::Clock::now() >= due_) Broken(Late(), rank_);
  }
  TellOthers(MessageType::kGoodbye, "", rank_);
}

void Star::Hear(size_t connection) {
  const int from = RankAt(connection);
  for (;;) {
    absl::StatusOr<std::optional<Message>> message = connections_[connection].TryReceive();
    if (message.ok() && !message->has_value()) return;
    if (message.ok() && (*message)->type != MessageType::kGoodbye) {
      Understand(from, **std::move(message));
      continue;
    }
    connections_[connection].Close();
    if (message.ok()) return Leave(from);
    return Broken(absl::UnavailableError(absl::StrCat(Name(from),
                                                      " has died: it was killed, has crashed or "
                                                      "has exited without leaving (",
                                                      message.status().message(), ")")),
                  from);
  }
}

void Star::Understand(int from, Message message) {
  Unpacker unpacker(message.payload);
  if (message.type == MessageType::kRefusal) {
    Broken(UnpackStatus(message.payload), from);
  } else if (message.type == MessageType::kNote) {
    notes_->Hear(message.payload);
    if (rank_ == 0) TellOthers(MessageType::kNote, message.payload, from);
  } else if (message.type == MessageType::kCalls) {
    if (rank_ == 0) TellOthers(MessageType::kCalls, message.payload, from);
    calls_to_hear_.push_back(std::move(message.payload));
  } else if (message.type == MessageType::kBlob && rank_ == 0) {
    const auto timeout_seconds = std::bit_cast<double>(unpacker.Number());
    std::string text = unpacker.Text();
    if (unpacker.ok()) Collect(from, std::move(text), timeout_seconds);
  } else if (message.type == MessageType::kBlobs && rank_ != 0) {
    std::vector<std::string> texts;
    for (size_t i = 0; i < participants_.size(); ++i) texts.push_back(unpacker.Text());
    if (unpacker.ok()) round_ = std::move(texts);
    due_ = WaitPoint::kNever;
    changed_.notify_all();
  }
}

void Star::Collect(int from, std::string text, double timeout_seconds) {
  if (!failure_.ok()) return;
  // The first that comes sets the time.
  if (due_ == WaitPoint::kNever) {
    timeout_seconds_ = timeout_seconds;
    due_ = DeadlineAfter(timeout_seconds);
    notice_.emplace(NoticeTimes());
  }
  texts_[static_cast<size_t>(from)] = std::move(text);
  if (const auto left = std::find(has_left_.begin(), has_left_.end(), true);
      left != has_left_.end())
    return Leave(static_cast<int>(left - has_left_.begin()));
  if (!std::all_of(texts_.begin(), texts_.end(), [](const auto& t) { return t.has_value(); }))
    return;
  Packer packer;
  round_.emplace();
  for (std::optional<std::string>& told : texts_) {
    packer.Add(*told);
    round_->push_back(*std::exchange(told, std::nullopt));
  }
  due_ = WaitPoint::kNever;
  TellOthers(MessageType::kBlobs, packer.Take(), rank_);
  changed_.notify_all();
}

// No failure, unless a rank waits for it.
void Star::Leave(int rank) {
  has_left_[static_cast<size_t>(rank)] = true;
  if (due_ == WaitPoint::kNever) return;
  Broken(absl::UnavailableError(
             absl::StrCat(Name(rank), " has left: its world was destroyed, or its process ends")),
         rank_);
}

void Star::Broken(absl::Status why, int told_by) {
  if (!failure_.ok() || why.ok()) return;
  failure_ = std::move(why);
  due_ = WaitPoint::kNever;
  to_tell_ = true;
  // Rank 0 passes it on between ranks that are not connected to each other.
  if (rank_ == 0 || told_by == rank_)
    TellOthers(MessageType::kRefusal, PackStatus(failure_), told_by);
  changed_.notify_all();
  Wake(wake_);
}

void Star::TellOthers(MessageType type, std::string_view payload, int except) {
  for (size_t i = 0; i < connections_.size(); ++i) {
    if (connections_[i].is_open() && RankAt(i) != except)
      connections_[i].Send(type, payload, Soon()).IgnoreError();  // one that has ended is heard of
  }
}

absl::Status Star::Late() const {
  if (rank_ != 0) {
    return absl::DeadlineExceededError(
        absl::StrCat(Name(0), " has not answered ", Name(rank_), " within ", timeout_seconds_,
                     " s, while its connection is open: it is stuck or stopped"));
  }
  return absl::DeadlineExceededError(absl::StrCat(
      "the other ranks have waited ", timeout_seconds_, " s for ", Missing(),
      ": not there where all ranks tell each other what they need to connect their GPUs"));
}

void Star::SayWaiting(double seconds) const {
  LogWaiting(Name(rank_), seconds, absl::StrCat("for ", Missing(), " to connect the ranks' GPUs"),
             timeout_seconds_, "");
}

void Star::TellCalls() {
  absl::Status apart = calls_.Check(rank_);  // the others are compared as they are heard
  const std::scoped_lock lock(mutex_);
  Broken(std::move(apart), rank_);
  TellOthers(MessageType::kCalls, calls_.Pack(), rank_);
}

std::string Star::Missing() const {
  constexpr int kNamed = 8;
  std::string names;
  int missing = 0;
  for (size_t rank = 0; rank < texts_.size(); ++rank) {
    if (texts_[rank].has_value() || ++missing > kNamed) continue;
    absl::StrAppend(&names, names.empty() ? "" : ", ", Name(static_cast<int>(rank)));
  }
  if (missing > kNamed) absl::StrAppend(&names, " and ", missing - kNamed, " more");
  return names;
}

absl::StatusOr<std::vector<std::string>> Star::AllGather(std::string_view mine,
                                                         double timeout_seconds) {
  std::unique_lock lock(mutex_);
  EBB_RETURN_IF_ERROR(failure_);
  round_.reset();
  if (rank_ == 0) {
    Collect(0, std::string(mine), timeout_seconds);
    Wake(wake_);  // there is a time now
  } else {
    if (has_left_[0]) return absl::UnavailableError(absl::StrCat(Name(0), " has left"));
    due_ = DeadlineAfter(timeout_seconds + kGraceSeconds);
    timeout_seconds_ = timeout_seconds;
    const auto time = std::bit_cast<uint64_t>(timeout_seconds);
    TellOthers(MessageType::kBlob, Packer().Add(time).Add(mine).Take(), rank_);
    Wake(wake_);
  }
  changed_.wait(lock, [&] { return round_.has_value() || !failure_.ok(); });
  if (!round_.has_value()) return failure_;
  return *std::exchange(round_, std::nullopt);
}

bool Star::Fail(const absl::Status& why) {
  const std::scoped_lock lock(mutex_);
  Broken(absl::Status(why.code(), absl::StrCat(why.message(), " (told by ", Name(rank_), ")")),
         rank_);
  return !has_left_[0];
}

void Star::OnFailure(Heard heard) {
  absl::Status already;
  {
    const std::scoped_lock lock(mutex_);
    already = failure_;
    if (already.ok() || to_tell_) return listeners_.push_back(std::move(heard));
  }
  heard(already);
}

}  // namespace ebb
