#include "ebb/runtime/comm/rendezvous/rendezvous.h"

#include <arpa/inet.h>
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "ebb/runtime/comm/rendezvous/store_group.h"
#include "ebb/runtime/device/machine.h"
#include "ebb/runtime/trace/log.h"
#include "processes.h"
#include "tests/status.h"

namespace ebb {
namespace {

// Replaces the resolver for three names: one that does not exist at first, one of another host, and
// one with a name server that never answers, even until this program ends.
struct NameServer {
  std::atomic<int> asked{0}, missing{0};
  WaitPoint never;
} name_server;

// Addresses for documentation (RFC 5737), which no host has.
constexpr char kElsewhere[] = "192.0.2.77";
constexpr char kTranslated[] = "192.0.2.78";
constexpr char kOfAnotherProgram[] = "192.0.2.79";
std::atomic<int> port_of_another_program{0};

}  // namespace
}  // namespace ebb

// Leads one address to this host, as NAT does, and one to another program.
extern "C" int connect(int socket, const sockaddr* address, socklen_t bytes) {
  static const auto real = reinterpret_cast<decltype(&connect)>(dlsym(RTLD_NEXT, "connect"));
  if (address->sa_family != AF_INET) return real(socket, address, bytes);
  sockaddr_in there = *reinterpret_cast<const sockaddr_in*>(address);
  const bool is_taken = there.sin_addr.s_addr == inet_addr(ebb::kOfAnotherProgram);
  if (is_taken) there.sin_port = htons(static_cast<uint16_t>(ebb::port_of_another_program));
  if (is_taken || there.sin_addr.s_addr == inet_addr(ebb::kTranslated))
    there.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return real(socket, reinterpret_cast<const sockaddr*>(&there), sizeof(there));
}

extern "C" int getaddrinfo(const char* host, const char* port, const addrinfo* hints,
                           addrinfo** found) {
  using ebb::name_server;
  static const auto real =
      reinterpret_cast<decltype(&getaddrinfo)>(dlsym(RTLD_NEXT, "getaddrinfo"));
  if ((hints->ai_flags & AI_NUMERICHOST) != 0) return real(host, port, hints, found);
  ++name_server.asked;
  const std::string name = host;
  if (name == "stuck.test") {
    name_server.never.Await([] { return false; });
  }
  if (name == "late.test" && name_server.missing-- > 0) return EAI_NONAME;
  if (name == "elsewhere.test") return real(ebb::kElsewhere, port, hints, found);
  return real(name == "late.test" ? "127.0.0.1" : host, port, hints, found);
}

namespace ebb {
namespace {

using ebb::testing::Says;
using ebb::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

// Listens on a port that no other process uses.
Descriptor Occupy(int& port) {
  Descriptor listener(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0));
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t bytes = sizeof(address);
  EXPECT_EQ(bind(listener.get(), reinterpret_cast<sockaddr*>(&address), bytes), 0);
  EXPECT_EQ(listen(listener.get(), 16), 0);
  getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &bytes);
  port = ntohs(address.sin_port);
  return listener;
}

int FreePort() {
  int port = 0;
  Occupy(port);
  return port;
}

RendezvousOptions Rank(int rank, int size, MeetingPlace place, double seconds = 60) {
  return {.rank = rank,
          .size = size,
          .place = std::move(place),
          .one_host = true,
          .launcher = "a test",
          .timeout_seconds = seconds};
}

// Joins each on a thread of its own. Returns the results.
std::vector<absl::StatusOr<Rendezvous>> JoinAll(const std::vector<RendezvousOptions>& all) {
  std::vector<absl::StatusOr<Rendezvous>> results;
  for (size_t i = 0; i < all.size(); ++i) results.emplace_back(absl::UnknownError("not run"));
  std::vector<std::thread> threads;
  for (size_t i = 0; i < all.size(); ++i)
    threads.emplace_back([&, i] { results[i] = Rendezvous::Join(all[i]); });
  for (std::thread& thread : threads) thread.join();
  return results;
}

void ExpectAllFail(const std::vector<RendezvousOptions>& all, absl::StatusCode code,
                   const std::string& text) {
  for (const auto& result : JoinAll(all)) {
    EXPECT_THAT(result.status(), StatusIs(code, text));
  }
}

// "rank 1 on host 'node1'".
std::string OnThisHost(int rank) {
  return "rank " + std::to_string(rank) + " on host '" + HostName() + "'";
}

MeetingPlace Tcp(const std::string& host) {
  return {.host = host, .port = FreePort(), .name = ""};
}
MeetingPlace Named() {
  return {.host = "", .port = 0, .name = ebb::testing::NewMeetingName()};
}

class PlaceTest : public ::testing::TestWithParam<const char*> {};

TEST_P(PlaceTest, EveryRankGetsTheListOfAll) {
  const std::string host = GetParam();
  const MeetingPlace place = host.empty() ? Named() : Tcp(host);
  std::vector<std::thread> threads;
  std::vector<uint64_t> nonces(3);
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      ASSERT_OK_AND_ASSIGN(Rendezvous rendezvous, Rendezvous::Join(Rank(rank, 3, place)));
      ASSERT_EQ(rendezvous.participants().size(), 3u);
      for (int other = 0; other < 3; ++other)
        EXPECT_EQ(rendezvous.participants()[static_cast<size_t>(other)].rank, other);
      nonces[static_cast<size_t>(rank)] = rendezvous.nonce();
      StoreGroup ranks(*Store::Hold(rank, std::move(rendezvous), 60));
      for (int round = 0; round < 3; ++round) {
        ASSERT_OK_AND_ASSIGN(const auto all,
                             ranks.AllGather(std::to_string(10 * round + rank), 60));
        EXPECT_EQ(all[2], std::to_string(10 * round + 2));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(nonces[0], nonces[1]);
  EXPECT_EQ(nonces[0], nonces[2]);
}

INSTANTIATE_TEST_SUITE_P(Places, PlaceTest, ::testing::Values("", "127.0.0.1", "::1", "localhost"),
                         [](const auto& test) {
                           const std::string host = test.param;
                           return host.empty()          ? std::string("socket")
                                  : host == "::1"       ? std::string("ipv6")
                                  : host == "localhost" ? host
                                                        : std::string("ipv4");
                         });

TEST(Rendezvous, RankThatDoesNotComeIsNamedOnAllThatDo) {
  const MeetingPlace place = Tcp("127.0.0.1");
  ExpectAllFail({Rank(0, 4, place, 0.3), Rank(2, 4, place, 0.3)},
                absl::StatusCode::kDeadlineExceeded, "for rank 1, rank 3 of 4 ranks");
}

TEST(Rendezvous, WithoutRankZeroTheOthersSayWhereTheyHaveWaited) {
  const MeetingPlace place = Tcp("127.0.0.1");
  ExpectAllFail({Rank(1, 2, place, 0.2)}, absl::StatusCode::kDeadlineExceeded,
                OnThisHost(1) + " has waited for rank 0 at host '127.0.0.1', port " +
                    std::to_string(place.port));
}

// The missing rank comes when the one rank that must log that line has written it.
TEST(Rendezvous, TheLogNamesTheMissingRank) {
  const MeetingPlace place = Tcp("127.0.0.1");
  for (const int missing : {0, 2}) {
    SCOPED_TRACE(missing);
    ::testing::internal::CaptureStderr();
    std::atomic<bool> said{false};
    WaitPoint changed;
    SurroundLogLines([&](const std::function<void()>& write) {
      write();
      said.store(true);
      changed.Notify();
    });
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < 3; ++rank) {
      ranks.emplace_back([&, rank] {
        if (rank == missing) changed.Await([&] { return said.load(); });
        RendezvousOptions options = Rank(rank, 3, place);
        constexpr double kNever = std::numeric_limits<double>::infinity();
        const int speaker = missing == 0 ? 1 : 0;
        options.notices = {.first_seconds = rank == speaker ? 0.02 : kNever,
                           .interval_seconds = kNever};
        const auto joined = Rendezvous::Join(options);
        EXPECT_TRUE(joined.ok()) << joined.status();
      });
    }
    for (std::thread& rank : ranks) rank.join();
    SurroundLogLines({});
    const std::string log = ::testing::internal::GetCapturedStderr();
    if (missing == 0) {
      EXPECT_THAT(log, AllOf(HasSubstr(OnThisHost(1) + " has waited "),
                             HasSubstr(" s for rank 0 at host '127.0.0.1', port ")));
    } else {
      EXPECT_THAT(log, AllOf(HasSubstr(OnThisHost(0) + " has waited "), HasSubstr("for rank "),
                             HasSubstr("rank 2"), HasSubstr(" of 3 ranks")));
    }
  }
}

TEST(Rendezvous, ANameThatDoesNotExistIsAnError) {
  ExpectAllFail({Rank(1, 2, {.host = "no such host", .port = 1, .name = ""}, 0.1)},
                absl::StatusCode::kDeadlineExceeded, "no such host");
}

TEST(Rendezvous, NameThatDoesNotExistYetIsWaitedFor) {
  name_server.missing = 2;
  const MeetingPlace place = Tcp("late.test");
  for (const auto& result : JoinAll({Rank(0, 2, place), Rank(1, 2, place)}))
    EXPECT_TRUE(result.ok()) << result.status();
  EXPECT_LE(name_server.missing, 0);
}

TEST(Rendezvous, ADeadNameServerBlocksNoRank) {
  const MeetingPlace place = Tcp("stuck.test");
  ExpectAllFail({Rank(1, 2, place, 0.1)}, absl::StatusCode::kDeadlineExceeded,
                OnThisHost(1) + " has waited for rank 0 at host 'stuck.test'");
  ExpectAllFail({Rank(0, 2, place, 0.1)}, absl::StatusCode::kDeadlineExceeded,
                "rank 0 (process " + std::to_string(getpid()));
  // If the other ranks may be on other hosts, rank 0 does not need to resolve its own name.
  RendezvousOptions anywhere = Rank(0, 2, place, 0.1);
  anywhere.one_host = false;
  ExpectAllFail({anywhere}, absl::StatusCode::kDeadlineExceeded, "for rank 1 of 2 ranks");
}

TEST(Rendezvous, AddressNeedsNoNameServer) {
  const int asked = name_server.asked;
  const MeetingPlace place = Tcp("127.0.0.1");
  for (const auto& result : JoinAll({Rank(0, 2, place), Rank(1, 2, place)}))
    EXPECT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(name_server.asked, asked);
}

TEST(Rendezvous, ALoopbackAddressIsNotOpenToTheNetwork) {
  for (const bool one_host : {true, false}) {
    ASSERT_OK_AND_ASSIGN(const auto listener,
                         Listen(Tcp("127.0.0.1"), one_host, WaitPoint::kNever));
    sockaddr_storage own = {};
    socklen_t bytes = sizeof(own);
    getsockname(listener.get(), reinterpret_cast<sockaddr*>(&own), &bytes);
    ASSERT_EQ(own.ss_family, AF_INET);
    EXPECT_EQ(reinterpret_cast<sockaddr_in&>(own).sin_addr.s_addr, htonl(INADDR_LOOPBACK));
  }
}

TEST(Rendezvous, RanksThatDoNotBelongTogetherAreAnErrorOnAll) {
  const auto two_of_one = [](const MeetingPlace& p) {
    return std::vector{Rank(0, 3, p), Rank(1, 3, p), Rank(1, 3, p)};
  };
  ExpectAllFail(two_of_one(Tcp("127.0.0.1")), absl::StatusCode::kFailedPrecondition,
                "two processes say that they are the same rank: rank 1");
  ExpectAllFail(two_of_one(Named()), absl::StatusCode::kFailedPrecondition, "rank 1");

  const MeetingPlace second = Tcp("127.0.0.1");
  ExpectAllFail({Rank(0, 3, second), Rank(0, 3, second), Rank(1, 3, second)},
                absl::StatusCode::kFailedPrecondition,
                "two processes say that they are the same rank: rank 0");

  const MeetingPlace third = Tcp("127.0.0.1");
  ExpectAllFail({Rank(0, 3, third), Rank(1, 2, third)}, absl::StatusCode::kFailedPrecondition,
                "one of 2. If two jobs meet there, give each a MASTER_PORT of its own");
}

RendezvousOptions RankOfJob(int rank, int size, const MeetingPlace& place, const std::string& job) {
  RendezvousOptions options = Rank(rank, size, place);
  options.launcher = LauncherText("a shell", job);
  return options;
}

// Two jobs have been given one place. Ranks of the second come first, with any rank and size.
TEST(Rendezvous, RanksOfAnotherJobAreRefusedAndTheJobGoesOn) {
  const MeetingPlace place = Tcp("127.0.0.1");
  absl::StatusOr<Rendezvous> zero = absl::UnknownError("not run");
  std::thread rank_zero([&] { zero = Rendezvous::Join(RankOfJob(0, 2, place, "77")); });
  RendezvousOptions by_another_launcher = Rank(1, 2, place);
  by_another_launcher.launcher = "srun, job 77";
  for (const RendezvousOptions& stranger :
       {RankOfJob(1, 2, place, "78"), RankOfJob(0, 2, place, "78"), RankOfJob(7, 9, place, "770"),
        by_another_launcher}) {
    const absl::Status refused = Rendezvous::Join(stranger).status();
    EXPECT_THAT(refused, StatusIs(absl::StatusCode::kFailedPrecondition,
                                  "is the meeting place of another job: rank 0 (process ",
                                  "started by a shell, job 77, has refused rank ",
                                  stranger.launcher, "a MASTER_PORT of its own"));
  }
  const absl::StatusOr<Rendezvous> one = Rendezvous::Join(RankOfJob(1, 2, place, "77"));
  rank_zero.join();
  EXPECT_TRUE(zero.ok()) << zero.status();
  EXPECT_TRUE(one.ok()) << one.status();
}

TEST(Rendezvous, ARankThatDoesNotKnowItsJobIsAdmitted) {
  const MeetingPlace place = Tcp("127.0.0.1");
  for (const auto& result : JoinAll({RankOfJob(0, 3, place, "77"), RankOfJob(1, 3, place, ""),
                                     RankOfJob(2, 3, place, "77")}))
    EXPECT_TRUE(result.ok()) << result.status();
}

TEST(Rendezvous, RankZeroDoesNotWaitWhereAnotherHostIsTheMeetingPlace) {
  int port = 0;
  const Descriptor listener = Occupy(port);
  port_of_another_program = port;
  std::vector<RendezvousOptions> zeros;
  for (const char* host : {kElsewhere, "elsewhere.test", kOfAnotherProgram}) {
    for (const bool one_host : {true, false}) {
      zeros.push_back(Rank(0, 2, Tcp(host)));
      zeros.back().one_host = one_host;
    }
  }
  ExpectAllFail(zeros, absl::StatusCode::kFailedPrecondition,
                "but rank 0 listens on another host: " + OnThisHost(0));
}

TEST(Rendezvous, TheMeetingPlaceMayBeAnAddressThatIsTranslated) {
  RendezvousOptions zero = Rank(0, 2, Tcp(kTranslated));
  zero.one_host = false;
  for (const auto& result : JoinAll({zero, Rank(1, 2, zero.place)}))
    EXPECT_TRUE(result.ok()) << result.status();
}

TEST(Rendezvous, APortThatIsTakenIsAnError) {
  MeetingPlace place = {.host = "127.0.0.1", .port = 0, .name = ""};
  const Descriptor occupant = Occupy(place.port);
  const auto results = JoinAll({Rank(0, 2, place, 5)});
  EXPECT_THAT(results[0].status(), StatusIs(absl::StatusCode::kAlreadyExists,
                                            std::to_string(place.port), "MASTER_PORT"));
}

TEST(Rendezvous, ARankThatReachesAnotherProgramSaysSo) {
  MeetingPlace place = {.host = "127.0.0.1", .port = 0, .name = ""};
  const Descriptor occupant = Occupy(place.port);
  std::thread program([&] {
    Descriptor visitor;
    while (!visitor.is_open()) visitor = Accept(occupant);
    const std::string answer = "HTTP/1.1 400 Bad Request\r\n\r\n";
    send(visitor.get(), answer.data(), answer.size(), MSG_NOSIGNAL);
    char byte;
    while (recv(visitor.get(), &byte, 1, 0) != 0) {
    }
  });
  ExpectAllFail({Rank(1, 2, place, 20)}, absl::StatusCode::kAlreadyExists,
                "does not speak Ebb's protocol");
  program.join();
}

TEST(Rendezvous, ARankDoesNotWaitForAProgramThatSendsNothing) {
  constexpr double kDays = 1e6;
  MeetingPlace place = {.host = "127.0.0.1", .port = 0, .name = ""};
  const Descriptor occupant = Occupy(place.port);
  ExpectAllFail({Rank(1, 2, place, kDays)}, absl::StatusCode::kAlreadyExists,
                "set MASTER_ADDR and MASTER_PORT");
}

TEST(Rendezvous, ARankDoesNotWaitForAProgramThatClosesEachConnection) {
  constexpr double kDays = 1e6;
  MeetingPlace place = {.host = "127.0.0.1", .port = 0, .name = ""};
  const Descriptor occupant = Occupy(place.port);
  std::atomic<bool> over{false};
  std::thread program([&] {
    while (!over) {
      Accept(occupant);
      std::this_thread::yield();
    }
  });
  ExpectAllFail({Rank(1, 2, place, kDays)}, absl::StatusCode::kAlreadyExists,
                "another program uses this address");
  over = true;
  program.join();
}

Descriptor ConnectWhenPossible(const MeetingPlace& place) {
  for (;;) {
    absl::StatusOr<Descriptor> socket = Connect(place, WaitPoint::kNever);
    if (socket.ok()) return *std::move(socket);
  }
}

// Strangers send these texts to rank 0 before the ranks come.
void MeetAmongStrangers(const std::vector<std::string>& texts) {
  const MeetingPlace place = Tcp("127.0.0.1");
  absl::StatusOr<Rendezvous> zero = absl::UnknownError("not run");
  std::thread rank_zero([&] { zero = Rendezvous::Join(Rank(0, 2, place)); });
  ConnectWhenPossible(place);  // it leaves at once
  std::vector<Descriptor> strangers;
  for (const std::string& text : texts) {
    strangers.push_back(ConnectWhenPossible(place));
    send(strangers.back().get(), text.data(), text.size(), MSG_NOSIGNAL);
  }
  const absl::StatusOr<Rendezvous> one = Rendezvous::Join(Rank(1, 2, place));
  rank_zero.join();
  EXPECT_TRUE(zero.ok()) << zero.status();
  EXPECT_TRUE(one.ok()) << one.status();
}

// A hello as version `version` of the protocol frames it.
std::string Hello(int version, const std::string& payload) {
  std::string bytes("Ebb!\0\0\1\0\0\0\0\0", 12);
  bytes[4] = static_cast<char>(version);
  bytes[8] = static_cast<char>(payload.size());
  return bytes + payload;
}

// A hello of a version with other contents after the first fields.
std::string OtherHello(int version, const std::string& launcher) {
  return Hello(version, Packer().Add(launcher).Add("Ebb 9.0.0").Add(12345).Take());
}

TEST(Rendezvous, ConnectionsOfOtherProgramsAreClosedAndDisturbNoRank) {
  MeetAmongStrangers({"GET / HTTP/1.1\r\n\r\n", "", "E",
                      std::string("Ebb!\2\0\1\0\xff\xff\xff\xff", 12), Hello(2, "what"),
                      Hello(7, ""), Hello(7, "what"), OtherHello(7, "another launcher"),
                      OtherHello(2, "another launcher"), std::string("Ebb!\7\0\2\0\0\0\0\0", 12),
                      std::string(100'000, 'x')});
}

// The errors of rank 0, and of a process that sends it `hello`.
void ExpectRefused(const std::string& hello, const std::string& text) {
  const MeetingPlace place = Tcp("127.0.0.1");
  absl::StatusOr<Rendezvous> zero = absl::UnknownError("not run");
  std::thread rank_zero([&] { zero = Rendezvous::Join(Rank(0, 2, place)); });
  Connection connection(ConnectWhenPossible(place));
  send(connection.fd(), hello.data(), hello.size(), MSG_NOSIGNAL);
  const absl::StatusOr<Message> answer = connection.Receive(WaitPoint::kNever);
  rank_zero.join();
  EXPECT_THAT(zero.status(), StatusIs(absl::StatusCode::kFailedPrecondition, text));
  ASSERT_TRUE(answer.ok()) << answer.status();
  EXPECT_EQ(UnpackStatus(answer->payload), zero.status());
}

TEST(Rendezvous, ARankOfAnotherBuildIsAnErrorOnAll) {
  ExpectRefused(OtherHello(7, "a test"), "Ebb 9.0.0 with version 7 of the protocol");
  Participant guest = Myself(1, 2, "a test");
  EXPECT_THAT(guest.build, AllOf(HasSubstr("Ebb 0."), HasSubstr("shared memory")));
  guest.build = "Ebb 0.0.1 (shared memory 77)";
  const std::string payload = Pack(guest);
  std::string hello = Hello(kProtocolVersion, payload);
  hello[9] = static_cast<char>(payload.size() >> 8);
  ExpectRefused(hello, "is of another build: Ebb 0.0.1 (shared memory 77)");
}

TEST(Rendezvous, EveryFieldOfAParticipantArrives) {
  Participant sent = Myself(3, 4, "a test");
  sent.without_mpi = "there is none";
  ASSERT_OK_AND_ASSIGN(const Participant got, UnpackParticipant(Pack(sent)));
  EXPECT_EQ(got.rank, 3);
  EXPECT_EQ(got.size, 4);
  EXPECT_EQ(got.launcher, sent.launcher);
  EXPECT_EQ(got.build, sent.build);
  EXPECT_EQ(got.host_name, sent.host_name);
  EXPECT_EQ(got.shared_memory, sent.shared_memory);
  EXPECT_EQ(got.pid_namespace, sent.pid_namespace);
  EXPECT_EQ(got.pid, sent.pid);
  EXPECT_EQ(got.cores, sent.cores);
  EXPECT_EQ(got.without_mpi, sent.without_mpi);
}

TEST(Rendezvous, ARankThatEndsAtOnceIsNamed) {
  const MeetingPlace place = Named();
  std::vector<absl::Status> seen(2);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      StoreGroup ranks(*Store::Hold(rank, *Rendezvous::Join(Rank(rank, 3, place)), 60));
      seen[static_cast<size_t>(rank)] = ranks.AllGather("", 60).status();
    });
  }
  EXPECT_TRUE(Rendezvous::Join(Rank(2, 3, place)).ok());
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(seen[0], seen[1]);
  EXPECT_THAT(seen[0], Says("rank 2 (process", "has died"));
}

}  // namespace
}  // namespace ebb
