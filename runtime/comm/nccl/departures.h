// Where the ranks of one communicator of NCCL's learn that one of them has left it, which NCCL does
// not tell: who waits for that rank would wait for the time-out.
//
// A rank leaves when all that it has called has ended, and says how many calls those were. So the
// first that leaves before others do has called least, and one departure says enough: who has
// called more than it can only wait in vain.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"

namespace ebb {

struct Departure {
  std::string rank;    // as messages name it
  uint64_t calls = 0;  // that all ranks of the communicator call together

  std::string Pack() const;
  static std::optional<Departure> Unpack(std::string_view text);
};

class Departures {
 public:
  virtual ~Departures() = default;
  // Of this rank. Waits for nobody.
  virtual void Leave(const Departure& mine) = 0;
  // Of any rank that is known to have left; once there is one, it stays. Any thread.
  virtual std::optional<Departure> First() = 0;
  // For the communicators that this one is split into. Collective over it.
  virtual absl::StatusOr<std::unique_ptr<Departures>> Split(int colour, int key) = 0;
};

// For ranks that can send each other texts: those of all communicators between the same ranks,
// which have names in them.
class DepartureNotes : public std::enable_shared_from_this<DepartureNotes> {
 public:
  // `tell` sends a text to all other ranks, which Hear it.
  explicit DepartureNotes(absl::AnyInvocable<void(std::string_view note)> tell)
      : tell_(std::move(tell)) {}
  // Any thread. Texts that cannot be read are passed over.
  void Hear(std::string_view note);
  // All ranks call it in the same order.
  std::unique_ptr<Departures> New();

 private:
  class Named;
  void Note(const std::string& name, Departure departure);

  absl::AnyInvocable<void(std::string_view note)> tell_;
  std::mutex mutex_;
  std::map<std::string, Departure> first_;  // by communicator
  int made_ = 0;
};

}  // namespace ebb
