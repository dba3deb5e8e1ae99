// Rank 0's part of a rendezvous until all ranks are there: it admits ranks and turns away processes
// that are no ranks of this world.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "ebb/runtime/comm/rendezvous/rendezvous.h"

namespace ebb {

class Admission {
 public:
  Admission(const RendezvousOptions& options, Descriptor listener);

  // Waits until every rank has said hello. On an error, all ranks that are there have been sent it.
  absl::Status AdmitAll(WaitPoint::Deadline deadline);

  std::vector<Participant> TakeParticipants() && { return std::move(participants_); }
  std::vector<Connection> TakeConnections() && { return std::move(connections_); }

 private:
  absl::Status AdmitSome(WaitPoint::Deadline deadline);
  absl::Status ReceiveHello(Connection& connection);
  absl::Status CheckConnected(int rank);
  absl::StatusOr<bool> CheckBuild(Connection& connection, const Message& hello);
  absl::Status Admit(Connection& connection, const Participant& candidate);
  std::string RankNames(bool have_come) const;
  std::string MissingRanks() const;
  void LogMissing(double seconds) const;
  absl::Status Late() const;
  void RefuseAll(const absl::Status& why, WaitPoint::Deadline deadline);

  const RendezvousOptions options_;
  Descriptor listener_;
  std::vector<Participant> participants_;  // by rank; valid where a connection is open
  std::vector<Connection> connections_;    // by rank
  std::vector<Connection> unknown_;        // processes that have not said hello yet
  int strangers_ = 0;
  int missing_;
};

}  // namespace ebb
