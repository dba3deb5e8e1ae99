#include "ebb/runtime/comm/rendezvous/store.h"

#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <numeric>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/comm/grouping.h"
#include "ebb/runtime/comm/rank_errors.h"
#include "ebb/runtime/comm/rendezvous/kept.h"
#include "ebb/runtime/device/thread_limit.h"

namespace ebb {
namespace {

// Every rank's thread reads all that comes, so a rank that takes nothing for this time has ended or
// is stuck.
constexpr std::chrono::milliseconds kStorePatience{500};
// The other ranks wait a little longer than rank 0, so that rank 0 can send them which rank is
// missing.
constexpr double kRoundGraceSeconds = 1;

// To which ranks come that have left.
constexpr char kLastRound[] = "last";

WaitPoint::Deadline Soon() {
  return WaitPoint::Clock::now() + kStorePatience;
}

// Not open if the kernel or a container forbids it.
Descriptor OpenProcess(int64_t pid) {
  return Descriptor(static_cast<int>(syscall(SYS_pidfd_open, static_cast<pid_t>(pid), 0)));
}

void Wake(const Descriptor& event) {
  const uint64_t one = 1;
  // The value fits the eventfd's counter.
  [[maybe_unused]] const ssize_t written = write(event.get(), &one, sizeof(one));
}

void Drain(const Descriptor& event) {
  uint64_t wakes = 0;
  [[maybe_unused]] const ssize_t bytes = read(event.get(), &wakes, sizeof(wakes));
}

}  // namespace

std::optional<ParentProcess> ParentProcess::Find(std::string name) {
  const pid_t pid = getppid();
  if (pid == 0) return std::nullopt;  // it is in another process namespace
  Descriptor process = OpenProcess(pid);
  // Otherwise it has ended in between, and the id may belong to another process.
  if (!process.is_open() || getppid() != pid) return std::nullopt;
  return ParentProcess{.pid = pid, .process = std::move(process), .name = std::move(name)};
}

absl::StatusOr<std::shared_ptr<Store>> Store::Hold(int rank, Rendezvous rendezvous,
                                                   double timeout_seconds,
                                                   std::optional<ParentProcess> launcher) {
  const std::vector<Participant> participants = rendezvous.participants();
  std::vector<Connection> connections = std::move(rendezvous).TakeConnections();
  for (const Connection& connection : connections)
    FailWhenUnreachable(connection.fd(), timeout_seconds);
  return Start(std::shared_ptr<Store>(
      new Store(rank, participants, std::move(connections), std::move(launcher))));
}

absl::StatusOr<std::vector<std::shared_ptr<Store>>> Store::OfThreads(
    int size, const std::vector<std::shared_ptr<CallOrder>>& calls) {
  std::vector<Participant> participants(static_cast<size_t>(size));
  for (int rank = 0; rank < size; ++rank) participants[rank].rank = rank;
  std::vector<Connection> rank_zeros(participants.size());
  std::vector<std::vector<Connection>> others(participants.size());
  for (size_t rank = 1; rank < participants.size(); ++rank) {
    int ends[2] = {-1, -1};
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) != 0)
      return absl::ResourceExhaustedError(absl::StrCat("socketpair: ", std::strerror(errno)));
    rank_zeros[rank] = Connection(Descriptor(ends[0]));
    others[rank].emplace_back(Descriptor(ends[1]));
    rank_zeros[rank].Trust();
    others[rank][0].Trust();
  }
  others[0] = std::move(rank_zeros);
  std::vector<std::shared_ptr<Store>> stores;
  for (size_t rank = 0; rank < participants.size(); ++rank) {
    EBB_ASSIGN_OR_RETURN(
        stores.emplace_back(),
        Start(std::shared_ptr<Store>(new Store(static_cast<int>(rank), participants,
                                               std::move(others[rank]), std::nullopt))));
    if (!calls.empty()) stores[rank]->ShareMemory(calls[rank], nullptr);
  }
  return stores;
}

absl::StatusOr<std::shared_ptr<Store>> Store::Start(std::shared_ptr<Store> store) {
  if (!store->wake_.is_open())
    return absl::ResourceExhaustedError(absl::StrCat("eventfd: ", std::strerror(errno)));
  try {
    store->thread_ = std::thread([of = store.get()] {
      of->Run();
      of->has_ended_.store(true, std::memory_order_release);
    });
  } catch (const std::system_error& error) {
    return NoThread("no thread to receive from the other ranks", error);
  }
  pthread_setname_np(store->thread_.native_handle(), "ebb-store");
  return std::shared_ptr<Store>(store.get(), [store](Store*) mutable { Stop(std::move(store)); });
}

Store::~Store() {
  if (thread_.joinable()) thread_.join();
}

Store::Store(int rank, std::vector<Participant> participants, std::vector<Connection> connections,
             std::optional<ParentProcess> launcher)
    : rank_(rank),
      participants_(std::move(participants)),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      calls_(std::make_shared<CallOrder>(rank, std::vector<CallRecord*>(participants_.size()))),
      connections_(std::move(connections)),
      launcher_(std::move(launcher)),
      processes_(participants_.size()),
      has_left_(participants_.size()) {}

void Store::ShareMemory(std::shared_ptr<CallOrder> calls,
                        std::function<bool(int rank)> ended_in_order) {
  const std::scoped_lock lock(mutex_);
  calls_ = std::move(calls);
  sends_calls_ = false;
  ended_in_order_ = std::move(ended_in_order);
  for (const Participant& other : participants_) {
    if (!ended_in_order_ || other.rank == rank_ || !IsOnThisHost(other.rank)) continue;
    processes_[other.rank] = OpenProcess(other.pid);  // or connections are left
  }
  Wake(wake_);
}

bool Store::IsOnThisHost(int rank) const {
  return participants_[rank].pid_namespace == participants_[rank_].pid_namespace;
}

void Store::Stop(std::shared_ptr<Store> store) {
  bool goes_on = false;
  {
    const std::scoped_lock lock(store->mutex_);
    store->stopping_ = true;
    if (store->rank_ == 0) {
      store->Leave(0);
      store->SendToOthers(MessageType::kLeaves, "", store->rank_);
      goes_on = !store->failure_->is_set() && store->HasOthers();
    }
  }
  Wake(store->wake_);
  Kept<Store>::RemoveEnded();
  // The others still need the thread, or a listener on it has ended the world.
  if (goes_on || store->thread_.get_id() == std::this_thread::get_id())
    Kept<Store>::Add(std::move(store));
}

void Store::Run() {
  std::unique_lock lock(mutex_);
  // Bytes that came with the last message of the rendezvous cannot be polled for.
  for (size_t i = 0; i < connections_.size(); ++i)
    if (connections_[i].is_open()) ReceiveFrom(i);
  while (!stopping_ || (rank_ == 0 && !failure_->is_set() && HasOthers())) {
    if (stopping_) launcher_.reset();
    if (std::exchange(to_report_, false)) {
      const std::vector<Listener> listeners = std::exchange(listeners_, {});
      lock.unlock();
      for (const Listener& listener : listeners) listener(status());
      lock.lock();
      continue;
    }
    WaitPoint::Deadline next = WaitPoint::kNever;
    for (const auto& [name, round] : rounds_) {
      if (!round.is_settled) next = std::min({next, round.due, round.notice->due()});
    }
    polled_.assign(1, {.fd = wake_.get(), .events = POLLIN, .revents = 0});
    const auto add = [&](int fd) {  // poll passes over -1
      polled_.push_back({.fd = fd, .events = POLLIN, .revents = 0});
    };
    for (const Connection& connection : connections_) add(connection.fd());
    for (const Descriptor& process : processes_) add(process.get());
    add(launcher_.has_value() ? launcher_->process.get() : -1);
    const int wait = PollMilliseconds(next);
    lock.unlock();
    const int ready = poll(polled_.data(), polled_.size(), wait);
    lock.lock();
    const auto is_ready = [&](size_t place) { return ready > 0 && polled_[place].revents != 0; };
    if (is_ready(0)) Drain(wake_);
    for (size_t i = 0; i < connections_.size(); ++i) {
      if (is_ready(1 + i)) ReceiveFrom(i);
    }
    for (size_t rank = 0; rank < processes_.size(); ++rank) {
      if (!is_ready(1 + connections_.size() + rank)) continue;
      processes_[rank] = Descriptor();
      Died(static_cast<int>(rank), absl::OkStatus());
    }
    if (launcher_.has_value() && is_ready(1 + connections_.size() + processes_.size())) {
      SetFailed(absl::UnavailableError(absl::StrCat("the launcher of the ranks, ", launcher_->name,
                                                    " (process ", launcher_->pid,
                                                    "), has ended: it was killed or crashed")),
                rank_);
      launcher_.reset();
    }
    if (!received_calls_.empty()) CompareReceived(lock);
    LookAtRounds(WaitPoint::Clock::now());
  }
  SendToOthers(MessageType::kGoodbye, "", rank_);
}

// Without the lock for a while, because comparing many ranks takes long.
void Store::CompareReceived(std::unique_lock<std::mutex>& lock) {
  const std::vector<std::string> received = std::exchange(received_calls_, {});
  const std::shared_ptr<CallOrder> calls = calls_;
  const std::function<void()> listener = on_calls_;
  absl::Status apart;
  lock.unlock();
  for (const std::string& text : received) apart.Update(calls->Receive(text));
  if (listener) listener();
  lock.lock();
  SetFailed(apart, rank_);
}

void Store::ReceiveFrom(size_t connection) {
  const int from = RankAt(connection);
  for (;;) {
    absl::StatusOr<std::optional<Message>> message = connections_[connection].TryReceive();
    if (message.ok() && !message->has_value()) return;
    if (message.ok() && (*message)->type != MessageType::kGoodbye) {
      Handle(from, **std::move(message));
      continue;
    }
    connections_[connection].Close();
    if (message.ok()) return Leave(from);
    return Died(from, message.status());
  }
}

void Store::Died(int rank, const absl::Status& error) {
  const bool has_left = has_left_[rank];
  // Ranks of several hosts hear of each other through rank 0 only.
  const bool is_needed = rank == 0 && participants_.size() > 2 && !IsOnThisHost(rank);
  if ((has_left && !is_needed) || (ended_in_order_ && ended_in_order_(rank))) return Leave(rank);
  const bool is_unreachable = absl::IsAborted(error);
  SetFailed(
      absl::UnavailableError(absl::StrCat(
          Name(rank),
          has_left ? " has left and its process has ended, so that the ranks of other hosts do not "
                     "hear of each other's failures any more"
          : is_unreachable ? " cannot be reached any more: its host has lost power or its network"
                           : " has died: it was killed, has crashed or has exited without leaving",
          error.ok() ? "" : absl::StrCat(" (", error.message(), ")"))),
      rank);
}

void Store::Handle(int from, Message message) {
  const auto pass_on = [&] {
    if (rank_ == 0) SendToOthers(message.type, message.payload, from);
  };
  Unpacker unpacker(message.payload);
  if (message.type == MessageType::kRefusal) {
    SetFailed(UnpackStatus(message.payload), from);
  } else if (message.type == MessageType::kLeaves) {
    Leave(from);
  } else if (message.type == MessageType::kLeavesCommunicator) {
    pass_on();
    std::string communicator;
    int size = 0;
    LeftRank left;
    if (unpacker.Read(communicator, size, left.name, left.calls))
      NoteLeft(communicator, size, std::move(left));
  } else if (message.type == MessageType::kCalls) {
    pass_on();
    received_calls_.push_back(std::move(message.payload));
  } else if (message.type == MessageType::kBlob && rank_ == 0) {
    Round round;
    std::string text;
    if (unpacker.Read(round.name, round.what, round.timeout_seconds, round.members, text) &&
        AreRanks(round.members))
      Collect(from, round, std::move(text));
  } else if (message.type == MessageType::kBlobs && rank_ != 0) {
    std::string name;
    Gathered gathered;
    if (unpacker.Read(name, gathered.outcome, gathered.number, gathered.absent, gathered.texts) &&
        AreRanks(gathered.absent))
      outcomes_[name] = std::move(gathered);
    changed_.notify_all();
  }
}

bool Store::AreRanks(const std::vector<int>& ranks) const {
  return std::all_of(ranks.begin(), ranks.end(), [this](int rank) {
    return rank >= 0 && rank < static_cast<int>(participants_.size());
  });
}

void Store::Collect(int from, const Round& round, std::string text) {
  Collected& all = rounds_[round.name];
  const std::vector<int>& members = all.round.members;
  if (members.empty()) {  // the first member that comes sets the time
    all.round = round;
    all.texts.resize(members.size());
    all.due = DeadlineAfter(round.timeout_seconds);
    all.notice.emplace(round.notices);
  }
  const auto found = std::find(members.begin(), members.end(), from);
  if (found == members.end()) return;
  all.texts[found - members.begin()] = std::move(text);
  ++all.here;
  if (from == rank_) all.notice.emplace(round.notices);
  SettleIfOver(all);
  if (all.here == members.size()) rounds_.erase(round.name);
}

// A departure is a failure only if a rank waits for it.
void Store::SettleIfOver(Collected& all) {
  if (all.is_settled) return;
  const std::vector<int>& members = all.round.members;
  if (all.here == members.size()) return Settle(all, Gathered::Outcome::kAll, {});
  const bool is_last = all.round.name == kLastRound;
  const auto left = std::find_if(members.begin(), members.end(), [&](int member) {
    const auto place = static_cast<size_t>(member);
    return is_last ? member != rank_ && !connections_[place].is_open() : has_left_[place];
  });
  if (left != members.end()) Settle(all, Gathered::Outcome::kLeft, {*left});
}

// Answers all members, also those that have not come, because rank 0 may leave before they do.
void Store::Settle(Collected& all, Gathered::Outcome outcome, std::vector<int> absent) {
  all.is_settled = true;
  Gathered gathered = {
      .outcome = outcome, .number = ++settled_, .texts = {}, .absent = std::move(absent)};
  if (outcome == Gathered::Outcome::kAll) {
    for (std::optional<std::string>& text : all.texts) gathered.texts.push_back(*std::move(text));
  }
  const std::string packed =
      Packer()
          .Add(all.round.name, gathered.outcome, gathered.number, gathered.absent, gathered.texts)
          .Take();
  for (const int member : all.round.members) {
    if (member == rank_) {
      outcomes_[all.round.name] = gathered;
    } else {  // a member that has ended shows elsewhere
      connections_[member].Send(MessageType::kBlobs, packed, Soon()).IgnoreError();
    }
  }
  changed_.notify_all();
}

void Store::LookAtRounds(WaitPoint::Deadline now) {
  for (auto& [name, all] : rounds_) {
    if (all.is_settled) continue;
    const Round& round = all.round;
    std::vector<int> here, absent;
    for (size_t place = 0; place < round.members.size(); ++place)
      (all.texts[place].has_value() ? here : absent).push_back(round.members[place]);
    if (now >= all.due) {
      Settle(all, Gathered::Outcome::kLate, std::move(absent));
    } else if (const std::optional<double> seconds = all.notice->Take(now)) {
      LogWaiting(NamesAndHosts(participants_, {here.data(), 1}), *seconds,
                 absl::StrCat("for ", NamesAndHosts(participants_, absent), " ", round.what),
                 round.timeout_seconds, calls_->Describe(absent));
    }
  }
}

void Store::Leave(int rank) {
  has_left_[rank] = true;
  for (auto& [name, all] : rounds_) SettleIfOver(all);
  changed_.notify_all();
}

void Store::SetFailed(const absl::Status& why, int reported_by) {
  if (failure_->is_set() || why.ok()) return;
  failure_->Set(why);
  to_report_ = true;
  // Rank 0 passes it on between ranks that are not connected to each other.
  SendToOthers(MessageType::kRefusal, PackStatus(why), reported_by);
  changed_.notify_all();
  Wake(wake_);
}

void Store::SendToOthers(MessageType type, std::string_view payload, int except) {
  for (size_t i = 0; i < connections_.size(); ++i) {
    if (connections_[i].is_open() && RankAt(i) != except)
      connections_[i].Send(type, payload, Soon()).IgnoreError();  // an ended rank shows later
  }
}

bool Store::HasOthers() const {
  return std::any_of(connections_.begin(), connections_.end(),
                     [](const Connection& connection) { return connection.is_open(); });
}

void Store::SendCalls() {
  // The other ranks are compared when their calls come, or compare themselves.
  absl::Status apart = calls_->Check(rank_);
  const std::scoped_lock lock(mutex_);
  SetFailed(apart, rank_);
  if (!sends_calls_) return;
  SendToOthers(MessageType::kCalls, calls_->Pack(), rank_);
}

void Store::OnCalls(std::function<void()> listener) {
  const std::scoped_lock lock(mutex_);
  on_calls_ = std::move(listener);
}

std::string Store::CompareCalls(std::span<const int> ranks) {
  absl::Status apart = calls_->Check();
  const std::scoped_lock lock(mutex_);
  SetFailed(apart, rank_);
  return calls_->Describe(ranks);
}

absl::StatusOr<Store::Gathered> Store::Gather(const Round& round, std::string_view mine) {
  // A rank that waits sends its calls, so that the others can compare them.
  WaitNotice sending({.first_seconds = round.notices.first_seconds / 5,
                      .interval_seconds = round.notices.interval_seconds});
  const WaitPoint::Deadline late = DeadlineAfter(round.timeout_seconds + kRoundGraceSeconds);
  std::unique_lock lock(mutex_);
  EBB_RETURN_IF_ERROR(status());
  if (rank_ == 0) {
    Collect(0, round, std::string(mine));
    Wake(wake_);  // there is a deadline now
  } else {
    const std::string packed =
        Packer().Add(round.name, round.what, round.timeout_seconds, round.members, mine).Take();
    SendToOthers(MessageType::kBlob, packed, rank_);
  }
  const auto is_over = [&] {
    return outcomes_.contains(round.name) || failure_->is_set() || !ReachesRankZero();
  };
  while (!is_over() && WaitPoint::Clock::now() < late) {
    if (sending.Take().has_value()) {
      lock.unlock();
      SendCalls();
      lock.lock();
      continue;
    }
    const WaitPoint::Deadline next = std::min(late, sending.due());
    if (next == WaitPoint::kNever) {
      changed_.wait(lock, is_over);
    } else {
      changed_.wait_until(lock, next, is_over);
    }
  }
  const auto gathered = outcomes_.extract(round.name);
  // A failure does not undo a round that all members have come to. The round is older than an
  // outcome that the failure may have caused.
  if (gathered && gathered.mapped().outcome == Gathered::Outcome::kAll) return gathered.mapped();
  EBB_RETURN_IF_ERROR(status());
  if (gathered) return gathered.mapped();
  return Gathered{
      .outcome = ReachesRankZero() ? Gathered::Outcome::kLate : Gathered::Outcome::kLeft,
      .number = 0,
      .texts = {},
      .absent = {0}};
}

void Store::Leave() {
  const std::scoped_lock lock(mutex_);
  Leave(rank_);
  SendToOthers(MessageType::kLeaves, "", rank_);
}

bool Store::MeetLast(double timeout_seconds) {
  std::vector<int> all(participants_.size());
  std::iota(all.begin(), all.end(), 0);
  const absl::StatusOr<Gathered> gathered = Gather({.name = kLastRound,
                                                    .members = std::move(all),
                                                    .timeout_seconds = timeout_seconds,
                                                    .what = "to end the program"},
                                                   "");
  return gathered.ok() && gathered->outcome != Gathered::Outcome::kLeft;
}

void Store::Fail(const absl::Status& why) {
  const std::scoped_lock lock(mutex_);
  SetFailed(why, rank_);
}

void Store::LeaveCommunicator(const std::string& name, int size, const LeftRank& mine) {
  const std::scoped_lock lock(mutex_);
  NoteLeft(name, size, mine);
  SendToOthers(MessageType::kLeavesCommunicator,
               Packer().Add(name, size, mine.name, mine.calls).Take(), rank_);
}

void Store::NoteLeft(const std::string& communicator, int size, LeftRank left) {
  Left& known = left_[communicator];
  if (known.count == 0) known.first = std::move(left);
  if (++known.count == size) left_.erase(communicator);
}

std::optional<LeftRank> Store::FirstToLeave(const std::string& communicator) {
  const std::scoped_lock lock(mutex_);
  const auto left = left_.find(communicator);
  return left == left_.end() ? std::nullopt : std::optional(left->second.first);
}

void Store::OnFailure(Listener listener) {
  {
    const std::scoped_lock lock(mutex_);
    if (!failure_->is_set() || to_report_) return listeners_.push_back(std::move(listener));
  }
  listener(status());
}

}  // namespace ebb
