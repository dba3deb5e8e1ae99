// Where the ranks of one communicator of NCCL's learn that one of them has left it, which NCCL does
// not tell: who waits for that rank would wait for the time-out. Ranks on several hosts say it through
// what they tell each other (rendezvous/store.h), others through a communicator (nccl/world_bootstrap.h).
//
// A rank leaves when all that it has called has ended, and says how many calls those were. So the
// first that leaves before others do has called least, and one farewell says enough: who has
// called more than it can only wait in vain.
#pragma once

#include <cstddef>
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

struct Farewell {
  std::string rank;    // as messages name it
  uint64_t calls = 0;  // that all ranks of the communicator call together

  std::string Pack() const;
  static std::optional<Farewell> Unpack(std::string_view text);
};

class Farewells {
 public:
  virtual ~Farewells() = default;
  // This rank has left. Waits for no rank.
  virtual void Say(const Farewell& mine) = 0;
  // Of any rank that is known to have left; once there is one, it stays. Any thread.
  virtual std::optional<Farewell> First() = 0;
  // For the communicators that this one is split into. Collective over it.
  virtual absl::StatusOr<std::unique_ptr<Farewells>> Split(int colour, int key) = 0;
};

// For ranks that can send each other texts: those of all communicators between the same ranks,
// which have names in them. Of a communicator it remembers nothing once this rank's Farewells of it
// are gone; what others say of one that this rank is still to make, it keeps until then.
class FarewellNotes : public std::enable_shared_from_this<FarewellNotes> {
 public:
  // `tell` sends a text to all other ranks, which Hear it.
  explicit FarewellNotes(absl::AnyInvocable<void(std::string_view note)> tell)
      : tell_(std::move(tell)) {}
  // Any thread. Texts that cannot be read are passed over.
  void Hear(std::string_view note);
  // All ranks call it in the same order.
  std::unique_ptr<Farewells> New();
  // Communicators that a rank is known to have left. Any thread.
  size_t known();

 private:
  class Named;
  void Note(const std::string& name, Farewell farewell);
  void Begin(const std::string& name);
  void End(const std::string& name);
  bool IsHereOrToCome(const std::string& name) const;
  void ForgetOthers();

  absl::AnyInvocable<void(std::string_view note)> tell_;
  std::mutex mutex_;
  std::map<std::string, Farewell> first_;  // by communicator
  std::map<std::string, int> here_;        // how often this rank has split the communicator so far
  int made_ = 0;                           // that were not split from others
};

}  // namespace ebb
