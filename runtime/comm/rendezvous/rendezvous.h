// How processes that know only a place and their ranks become a world: rank 0 listens, the others
// connect and give their ranks, and rank 0 sends all of them the list.
//
//   rank 0   listen --- admit all --- table ---+--- connections, for the store (store.h)
//   rank r   connect --- hello --- welcome ----+
//
// Rank 0 welcomes each rank at once, also while others are missing. So a rank without a welcome
// knows that it has reached another program.
//
// An error goes to every rank that can be reached: a rank came twice or too late, or with another
// size or build of Ebb. Other programs are disconnected and do not disturb. A rank of another job,
// which has the same place, gets an error, and this job goes on. Connections stay open: a closed one
// means that a rank has ended.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "ebb/runtime/comm/backend.h"
#include "ebb/runtime/comm/rendezvous/connection.h"
#include "ebb/runtime/comm/rendezvous/hosts.h"
#include "ebb/runtime/comm/rendezvous/socket.h"

namespace ebb {

struct RendezvousOptions {
  int rank = 0;
  int size = 1;
  MeetingPlace place = {};
  bool one_host = false;  // if the launcher has said so
  std::string launcher;   // and job: LauncherText, the same on all ranks
  double timeout_seconds = 600;
  NoticeTimes notices = {};                        // when the log says which ranks are waited for
  std::shared_ptr<Descriptor> listener = nullptr;  // rank 0's, if it listens already
  std::string host_name = {};                      // replaces this host's name; for tests
  std::string without_mpi = {};                    // of Participant
};

class Rendezvous {
 public:
  static absl::StatusOr<Rendezvous> Join(const RendezvousOptions& options);
  Rendezvous(Rendezvous&&) = default;
  Rendezvous& operator=(Rendezvous&&) = default;

  const std::vector<Participant>& participants() const { return participants_; }
  // A number that no other world has.
  uint64_t nonce() const { return nonce_; }

  double timeout_seconds() const { return options_.timeout_seconds; }

  // Rank 0: a connection to every rank, by rank; its own is not open. Others: one connection, to
  // rank 0.
  std::vector<Connection> TakeConnections() && { return std::move(connections_); }

 private:
  explicit Rendezvous(const RendezvousOptions& options);
  absl::Status JoinAsRankZero();
  absl::Status JoinAsOtherRank();
  absl::Status ReceiveTable();
  void LogWait(double seconds, const absl::Status& last) const;
  absl::Status ReadTable(std::string_view payload);
  absl::Status FromRankZero(const absl::Status& error) const;
  absl::Status NotWelcomed(const absl::Status& error) const;

  RendezvousOptions options_;
  WaitPoint::Deadline deadline_;
  std::vector<Participant> participants_;
  uint64_t nonce_ = 0;
  std::vector<Connection> connections_;
};

}  // namespace ebb
