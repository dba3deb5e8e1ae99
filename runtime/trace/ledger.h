// The memory ledger: every byte that the runtime holds, by class of state and tier. The plan
// predicts it; the ledger counts it.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "ebb/sharding/state.h"

namespace ebb {

class MemoryLedger {
 public:
  // Bytes that are held as long as this object lives. Move-only.
  class Charge {
   public:
    Charge() = default;
    Charge(MemoryLedger& ledger, StateClass state, Tier tier, int64_t bytes);
    Charge(Charge&& other) noexcept { *this = static_cast<Charge&&>(other); }
    Charge& operator=(Charge&& other) noexcept;
    ~Charge() { GiveBack(); }

   private:
    void GiveBack();

    MemoryLedger* ledger_ = nullptr;
    StateClass state_{};
    Tier tier_{};
    int64_t bytes_ = 0;
  };

  MemoryLedger();
  ~MemoryLedger();
  // Rows with a prediction or a peak, by class, then tier. Any thread.
  std::vector<MemoryRow> Rows() const;
  // Adds to the prediction; below 0: takes from it.
  void Predict(StateClass state, Tier tier, int64_t bytes);

 private:
  friend class Charge;
  struct Cells;
  std::unique_ptr<Cells> cells_;
};

}  // namespace ebb
