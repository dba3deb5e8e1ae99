#include "ebb/runtime/comm/rendezvous/store.h"

#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/comm/grouping.h"
#include "ebb/runtime/comm/rendezvous/kept.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/device/thread_limit.h"

namespace ebb {
namespace {

// Every rank's thread reads all that comes, so a rank that takes nothing for this time has ended or
// is stuck.
constexpr std::chrono::milliseconds kSendPatience{500};
// The other ranks wait a little longer than rank 0, so that rank 0 can tell them which rank is
// missing.
constexpr double kRoundGraceSeconds = 1;
constexpr char kEnds[] = "its world was destroyed, or its process ends";

WaitPoint::Deadline Soon() {
  return WaitPoint::Clock::now() + kSendPatience;
}

// Not open if the kernel or a container forbids it.
Descriptor OpenProcess(int64_t pid) {
  return Descriptor(static_cast<int>(syscall(SYS_pidfd_open, static_cast<pid_t>(pid), 0)));
}

std::vector<Participant> Threads(int size) {
  std::vector<Participant> participants(static_cast<size_t>(size));
  for (int rank = 0; rank < size; ++rank) participants[static_cast<size_t>(rank)].rank = rank;
  return participants;
}

}  // namespace

std::optional<ParentProcess> ParentProcess::Find() {
  const pid_t pid = getppid();
  if (pid == 0) return std::nullopt;  // it is in another process namespace
  Descriptor process = OpenProcess(pid);
  // Otherwise it has ended in between, and the id may belong to another process.
  if (!process.is_open() || getppid() != pid) return std::nullopt;
  return ParentProcess{.pid = pid, .process = std::move(process)};
}

absl::StatusOr<std::shared_ptr<Store>> Store::Hold(int rank, Rendezvous rendezvous,
                                                   std::optional<ParentProcess> launcher) {
  const std::vector<Participant> participants = rendezvous.participants();
  const uint64_t nonce = rendezvous.nonce();
  std::shared_ptr<Store> store(new Store(
      rank, nonce, participants, std::move(rendezvous).TakeConnections(), std::move(launcher)));
  if (!store->wake_.is_open())
    return absl::ResourceExhaustedError(absl::StrCat("eventfd: ", std::strerror(errno)));
  try {
    store->thread_ = std::thread([raw = store.get()] { raw->Run(); });
  } catch (const std::system_error& error) {
    return NoThread("no thread to hear the other ranks", error);
  }
  pthread_setname_np(store->thread_.native_handle(), "ebb-store");
  // The thread needs the object for longer than the owners that end it.
  Store* const raw = store.get();
  return std::shared_ptr<Store>(
      raw, [store = std::move(store)](Store*) mutable { store->Stop(std::move(store)); });
}

Store::Store(int rank, uint64_t nonce, std::vector<Participant> participants,
             std::vector<Connection> connections, std::optional<ParentProcess> launcher)
    : rank_(rank),
      nonce_(nonce),
      participants_(std::move(participants)),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      calls_{std::make_shared<CallOrder>(rank, std::vector<CallRecord*>(participants_.size()))},
      launcher_(std::move(launcher)),
      processes_(participants_.size()),
      connections_(std::move(connections)),
      rounds_(size(), std::bind_front(&Store::Answer, this)) {}

Store::Store(int threads)
    : rank_(-1),
      participants_(Threads(threads)),
      records_(participants_.size()),
      tells_calls_(false),
      rounds_(size(), std::bind_front(&Store::Answer, this)) {
  std::vector<CallRecord*> records;
  for (CallRecord& record : records_) records.push_back(&record);
  for (int rank = 0; rank < threads; ++rank)
    calls_.push_back(std::make_shared<CallOrder>(rank, records));
}

Store::~Store() {
  if (thread_.joinable()) thread_.join();
}

void Store::ShareMemory(std::shared_ptr<CallOrder> calls,
                        std::function<bool(int rank)> ended_in_order) {
  const Participant& me = participants_[ToIndex(rank_)];
  {
    const std::scoped_lock lock(mutex_);
    tells_calls_ = false;
    calls_[0] = std::move(calls);
    ended_in_order_ = std::move(ended_in_order);
    for (const Participant& other : participants_) {
      if (other.rank != rank_ && other.pid_namespace == me.pid_namespace)
        processes_[ToIndex(other.rank)] = OpenProcess(other.pid);  // or connections are left
    }
  }
  Wake();
}

void Store::Stop(std::shared_ptr<Store> self) {
  bool goes_on = false;
  {
    const std::scoped_lock lock(mutex_);
    stopping_ = true;
    if (rank_ == 0) {
      HasLeft(0, kEnds);
      TellOthers(MessageType::kLeaves, "", rank_);
    }
    goes_on = GoesOn();
  }
  Wake();
  Kept<Store>::RemoveEnded();
  // The others still need the thread, or a listener has ended the world.
  if (goes_on || thread_.get_id() == std::this_thread::get_id()) Kept<Store>::Add(std::move(self));
}

void Store::Wake() {
  const uint64_t one = 1;
  // The value fits the eventfd's counter.
  [[maybe_unused]] const ssize_t written = write(wake_.get(), &one, sizeof(one));
}

void Store::Run() {
  std::unique_lock lock(mutex_);
  // Bytes that came with the last message of the rendezvous cannot be polled for.
  for (size_t i = 0; i < connections_.size(); ++i)
    if (connections_[i].is_open()) Hear(i);
  while (!stopping_ || GoesOn()) {
    if (stopping_) launcher_.reset();
    TellListeners(lock);
    Poll(lock);
    HearCalls(lock);
    LookAtRounds();
  }
  TellOthers(MessageType::kGoodbye, "", rank_);
  has_ended_.store(true, std::memory_order_release);
}

void Store::Poll(std::unique_lock<std::mutex>& lock) {
  polled_.assign(1, {.fd = wake_.get(), .events = POLLIN, .revents = 0});
  const auto add = [&](int fd) {  // poll passes over -1
    polled_.push_back({.fd = fd, .events = POLLIN, .revents = 0});
  };
  for (const Connection& connection : connections_) add(connection.fd());
  for (const Descriptor& process : processes_) add(process.get());
  add(launcher_.has_value() ? launcher_->process.get() : -1);
  constexpr int kSliceMilliseconds = 60'000;
  const int wait = PollMilliseconds(rounds_.due(), kSliceMilliseconds);
  lock.unlock();
  const int ready = poll(polled_.data(), polled_.size(), wait);
  lock.lock();
  if (ready <= 0) return;
  const auto is_ready = [&](size_t place) { return polled_[place].revents != 0; };
  uint64_t wakes = 0;
  if (is_ready(0)) [[maybe_unused]]
    const ssize_t bytes = read(wake_.get(), &wakes, sizeof(wakes));
  for (size_t i = 0; i < connections_.size(); ++i) {
    if (is_ready(1 + i)) Hear(i);
  }
  for (size_t rank = 0; rank < processes_.size(); ++rank) {
    if (!is_ready(1 + connections_.size() + rank)) continue;
    processes_[rank] = Descriptor();
    Died(static_cast<int>(rank), "");
  }
  if (launcher_.has_value() && is_ready(1 + connections_.size() + processes_.size())) {
    Broken(absl::UnavailableError(absl::StrCat("the launcher of the ranks, ", launcher_->name,
                                               " (process ", launcher_->pid,
                                               "), has ended: it was killed or crashed")),
           rank_);
    launcher_.reset();
  }
}

void Store::HearCalls(std::unique_lock<std::mutex>& lock) {
  if (calls_to_hear_.empty()) return;
  const std::vector<std::string> texts = std::exchange(calls_to_hear_, {});
  const std::shared_ptr<CallOrder> calls = calls_[0];
  absl::Status apart;
  lock.unlock();  // comparing many ranks takes a while
  for (const std::string& text : texts) apart.Update(calls->Hear(text));
  lock.lock();
  Broken(std::move(apart), rank_);
}

void Store::TellListeners(std::unique_lock<std::mutex>& lock) {
  if (!std::exchange(to_tell_, false)) return;
  const std::vector<Heard> listeners = std::exchange(listeners_, {});
  const absl::Status why = failure_->Get();
  lock.unlock();
  for (const Heard& heard : listeners) heard(why);
  lock.lock();
}

void Store::Hear(size_t connection) {
  const int from = RankAt(connection);
  for (;;) {
    absl::StatusOr<std::optional<Message>> message = connections_[connection].TryReceive();
    if (message.ok() && !message->has_value()) return;
    if (message.ok() && (*message)->type != MessageType::kGoodbye) {
      Understand(from, **std::move(message));
      continue;
    }
    connections_[connection].Close();
    if (message.ok()) return HasLeft(from, kEnds);
    return Died(from, absl::StrCat(" (", message.status().message(), ")"));
  }
}

void Store::Died(int rank, std::string_view how) {
  if (ended_in_order_ && ended_in_order_(rank)) return HasLeft(rank, kEnds);
  Broken(absl::UnavailableError(
             absl::StrCat(Describe(participants_[ToIndex(rank)]),
                          " has died: it was killed, has crashed or has exited without leaving",
                          absl::string_view(how.data(), how.size()))),
         rank);
}

void Store::Understand(int from, Message message) {
  const auto pass_on = [&] {
    if (rank_ == 0) TellOthers(message.type, message.payload, from);
  };
  Unpacker unpacker(message.payload);
  if (message.type == MessageType::kRefusal) {
    Broken(UnpackStatus(message.payload), from);
  } else if (message.type == MessageType::kLeaves) {
    HasLeft(from, kEnds);
  } else if (message.type == MessageType::kDeparture) {
    pass_on();
    std::string communicator;
    int size = 0;
    Departure left;
    if (unpacker.Read(communicator, size, left.name, left.calls))
      HasDeparted(communicator, size, left);
  } else if (message.type == MessageType::kCalls) {
    pass_on();
    calls_to_hear_.push_back(std::move(message.payload));
  } else if (message.type == MessageType::kBlob && rank_ == 0) {
    Round round;
    bool comes = false;
    std::string text;
    if (unpacker.Read(round.name, round.what, round.timeout_seconds, round.members, comes, text) &&
        AreRanks(round.members))
      rounds_.Collect(from, round, comes ? std::optional(std::move(text)) : std::nullopt);
  } else if (message.type == MessageType::kBlobs && rank_ != 0) {
    std::string name;
    Gathered gathered;
    if (unpacker.Read(name, gathered.outcome, gathered.number, gathered.absent, gathered.how_left,
                      gathered.texts) &&
        AreRanks(gathered.absent))
      Answer(rank_, name, gathered);
  }
}

bool Store::AreRanks(const std::vector<int>& ranks) const {
  return std::all_of(ranks.begin(), ranks.end(),
                     [this](int rank) { return rank >= 0 && rank < size(); });
}

// At rank 0, or on the way there.
void Store::Collect(int rank, const Round& round, std::optional<std::string> text) {
  if (rank_ <= 0) {
    rounds_.Collect(rank, round, std::move(text));
    return Wake();  // there may be a deadline now
  }
  const bool comes = text.has_value();
  const std::string packed = Packer()
                                 .Add(round.name, round.what, round.timeout_seconds, round.members,
                                      comes, text.value_or(""))
                                 .Take();
  TellOthers(MessageType::kBlob, packed, rank_);
}

void Store::Answer(int member, const std::string& round, const Gathered& gathered) {
  if (is_threads() || member == rank_) {
    outcomes_[{round, member}] = gathered;
    return changed_.notify_all();
  }
  const std::string packed = Packer()
                                 .Add(round, gathered.outcome, gathered.number, gathered.absent,
                                      gathered.how_left, gathered.texts)
                                 .Take();
  // A member that has ended shows elsewhere.
  connections_[ToIndex(member)].Send(MessageType::kBlobs, packed, Soon()).IgnoreError();
}

void Store::LookAtRounds() {
  rounds_.Look(WaitPoint::Clock::now(),
               [this](const std::vector<int>& absent) { return calls_[0]->Describe(absent); });
}

void Store::HasLeft(int rank, const std::string& how) {
  rounds_.Leave(rank, how);
  changed_.notify_all();
}

void Store::Broken(absl::Status why, int reported_by) {
  if (failure_->is_set() || why.ok()) return;
  failure_->Set(why);
  to_tell_ = true;
  // Rank 0 passes it on between ranks that are not connected to each other.
  TellOthers(MessageType::kRefusal, PackStatus(why), reported_by);
  changed_.notify_all();
  Wake();
}

void Store::TellOthers(MessageType type, std::string_view payload, int except) {
  for (size_t i = 0; i < connections_.size(); ++i) {
    if (connections_[i].is_open() && RankAt(i) != except)
      connections_[i].Send(type, payload, Soon()).IgnoreError();  // an ended rank shows later
  }
}

bool Store::HasOthers() const {
  return std::any_of(connections_.begin(), connections_.end(),
                     [](const Connection& connection) { return connection.is_open(); });
}

void Store::TellCalls(int rank) {
  // The other ranks are compared when their calls come, or compare themselves.
  Break(calls(rank)->Check(rank));
  const std::scoped_lock lock(mutex_);
  if (tells_calls_) TellOthers(MessageType::kCalls, calls_[0]->Pack(), rank_);
}

std::string Store::CompareCalls(std::span<const int> ranks) {
  Break(calls_[0]->Check());
  return calls_[0]->Describe(ranks);
}

absl::StatusOr<Gathered> Store::Gather(int rank, const Round& round, std::string_view mine) {
  // A rank that waits sends its calls, so that the others can compare them.
  WaitNotice telling({.first_seconds = round.notices.first_seconds / 5,
                      .interval_seconds = round.notices.interval_seconds});
  const WaitPoint::Deadline late = DeadlineAfter(round.timeout_seconds + kRoundGraceSeconds);
  const std::pair<std::string, int> key(round.name, rank);
  std::unique_lock lock(mutex_);
  EBB_RETURN_IF_ERROR(failure_->Get());
  Collect(rank, round, std::string(mine));
  const auto is_over = [&] {
    return outcomes_.contains(key) || failure_->is_set() || !ReachesRankZero();
  };
  while (!is_over() && WaitPoint::Clock::now() < late) {
    if (telling.Take().has_value()) {
      lock.unlock();
      TellCalls(rank);
      lock.lock();
      continue;
    }
    const WaitPoint::Deadline next = std::min({late, telling.due(), rounds_.due()});
    if (next == WaitPoint::kNever) {
      changed_.wait(lock);
    } else {
      changed_.wait_until(lock, next);
    }
    LookAtRounds();
  }
  const auto gathered = outcomes_.extract(key);
  // A failure does not undo a round that all members have come to. The round is older than an
  // outcome that the failure may have caused.
  if (gathered && gathered.mapped().outcome == Gathered::Outcome::kAll) return gathered.mapped();
  EBB_RETURN_IF_ERROR(failure_->Get());
  if (gathered) return gathered.mapped();
  return Gathered{
      .outcome = ReachesRankZero() ? Gathered::Outcome::kLate : Gathered::Outcome::kLeft,
      .absent = {0},
      .how_left = kEnds};
}

void Store::LeaveRound(int rank, const Round& round) {
  const std::scoped_lock lock(mutex_);
  outcomes_.erase({round.name, rank});
  if (!failure_->is_set()) Collect(rank, round, std::nullopt);
}

void Store::Leave(int rank, const std::string& how) {
  const std::scoped_lock lock(mutex_);
  HasLeft(rank, how);
}

void Store::Break(const absl::Status& why) {
  std::unique_lock lock(mutex_);
  Broken(why, rank_);
  if (is_threads()) TellListeners(lock);
}

void Store::Fail(const absl::Status& why) {
  if (is_threads()) return Break(why);
  Break(absl::Status(why.code(), absl::StrCat(why.message(), " (told by ",
                                              Describe(participants_[ToIndex(rank_)]), ")")));
}

void Store::NoteFailure(int rank) {
  const std::scoped_lock lock(mutex_);
  if (std::find(failures_.begin(), failures_.end(), rank) == failures_.end())
    failures_.push_back(rank);
}

std::vector<int> Store::failures() {
  const std::scoped_lock lock(mutex_);
  return failures_;
}

void Store::Depart(const std::string& communicator, int size, const Departure& mine) {
  const std::scoped_lock lock(mutex_);
  HasDeparted(communicator, size, mine);
  TellOthers(MessageType::kDeparture,
             Packer().Add(communicator, size, mine.name, mine.calls).Take(), rank_);
}

void Store::HasDeparted(const std::string& communicator, int size, const Departure& departure) {
  Departures& known = departures_.try_emplace(communicator, Departures{departure}).first->second;
  if (++known.count == size) departures_.erase(communicator);
}

std::optional<Departure> Store::FirstDeparture(const std::string& communicator) {
  const std::scoped_lock lock(mutex_);
  const auto found = departures_.find(communicator);
  return found == departures_.end() ? std::nullopt : std::optional(found->second.first);
}

void Store::OnFailure(Heard heard) {
  absl::Status already;
  {
    const std::scoped_lock lock(mutex_);
    already = failure_->Get();
    if (already.ok() || to_tell_) return listeners_.push_back(std::move(heard));
  }
  heard(already);
}

}  // namespace ebb
