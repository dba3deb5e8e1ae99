// Machines to rent, compared by the price of the same training.
#pragma once

#include <optional>
#include <span>
#include <string>

#include "ebb/runtime/planner/search.h"

namespace ebb::planner {

// A machine to rent, and the answer for the number of hosts with the cheapest tokens.
struct Offer {
  Machine machine;
  double price_an_hour = 0;  // of a host, in any currency; 0: not known
  int hosts = 0;             // 1, 2, 4, ...; 0: none does, and `lacks` says why
  std::string lacks = {};
  std::optional<Answer> answer = {};
  // 0: not known.
  double price_of(double tokens) const;
  double hours_of(double tokens) const;
};
// If the question has sequences, all machines train with them, and no rank is without one.
// Tries powers of two up to kHostsMax, and up to kHostsAhead times the best so far.
inline constexpr int kHostsMax = 1024, kHostsAhead = 4;
void FillOffer(Question question, Offer& offer);
// Null: none fits, or none has a price.
const Offer* Cheapest(std::span<const Offer> offers);

}  // namespace ebb::planner
