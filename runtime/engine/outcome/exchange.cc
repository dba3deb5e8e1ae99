#include "ebb/runtime/engine/outcome/exchange.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/comm/rank_errors.h"

namespace ebb {

namespace {

bool BeginsCharacter(char c) {
  return (static_cast<unsigned char>(c) & 0xc0u) != 0x80u;
}

// A text that is too long is cut in the middle, between characters: the beginning says what failed,
// and the reason often stands behind a path of any length.
std::string Fitting(absl::string_view text, size_t bytes_max) {
  if (text.size() <= bytes_max) return std::string(text);
  constexpr absl::string_view kCut = " ... ";
  size_t head = (bytes_max - kCut.size()) / 2,
         tail = text.size() - (bytes_max - kCut.size() - head);
  while (head > 0 && !BeginsCharacter(text[head])) --head;
  while (tail < text.size() && !BeginsCharacter(text[tail])) ++tail;
  return absl::StrCat(text.substr(0, head), kCut, text.substr(tail));
}

}  // namespace

void ExchangeRecord::SetError(const absl::Status& status) {
  failed = true;
  status_code = static_cast<int32_t>(status.code());
  const std::string text = Fitting(status.message(), sizeof(message));
  message_bytes = static_cast<int32_t>(text.size());
  std::memcpy(message, text.data(), text.size());
}

absl::Status ExchangeRecord::Error(std::string_view rank_name) const {
  return OfRank(rank_name, absl::Status(static_cast<absl::StatusCode>(status_code),
                                        {message, static_cast<size_t>(message_bytes)}));
}

void ExchangeRecord::SetTrail(const ScopeTrail& trail) {
  static_assert(sizeof(ScopeTrail) <= sizeof(message) && std::is_trivially_copyable_v<ScopeTrail>);
  std::memcpy(message, &trail, sizeof(trail));
}

ScopeTrail ExchangeRecord::Trail() const {
  ScopeTrail trail;
  std::memcpy(&trail, message, sizeof(trail));
  return trail;
}

void ExchangeRecord::SetSums(const Evaluation::Sums& sums) {
  static_assert(sizeof(Evaluation::Sums) <= sizeof(message) &&
                std::is_trivially_copyable_v<Evaluation::Sums>);
  std::memcpy(message, &sums, sizeof(sums));
}

Evaluation::Sums ExchangeRecord::Sums() const {
  Evaluation::Sums sums;
  std::memcpy(&sums, message, sizeof(sums));
  return sums;
}

Evaluation::Sums SumsOf(std::span<const ExchangeRecord> records) {
  Evaluation::Sums all = {};
  for (const ExchangeRecord& record : records) {
    const Evaluation::Sums sums = record.Sums();
    for (size_t i = 0; i < all.size(); ++i) {
      all[i].sum += sums[i].sum;
      all[i].count += sums[i].count;
    }
  }
  return all;
}

bool IsEarlier(int unit, int other, std::span<const int> backwards) {
  if (backwards.empty()) return unit < other;
  return backwards[static_cast<size_t>(unit)] < backwards[static_cast<size_t>(other)];
}

std::optional<ReplicaDifference> DifferenceOfReplicas(std::span<const double> squares,
                                                      const VerdictRanks& ranks,
                                                      std::span<const int> backwards) {
  std::optional<ReplicaDifference> found;
  const size_t units = ranks.compared.size();
  for (int n = 0; n < std::ssize(ranks.ranks); ++n) {
    const int first = ranks.ranks[ranks.mesh.with(n, Axis::kTensor, 0)], other = ranks.ranks[n];
    for (size_t k = 0; k < units; ++k) {
      const double of_first = squares[first * units + k], of_other = squares[other * units + k];
      const int unit = ranks.compared[k];
      if (of_first == of_other || (found && !IsEarlier(unit, found->unit, backwards))) continue;
      found = {.unit = unit,
               .first = first,
               .other = other,
               .other_tensor = ranks.mesh.coordinate(n, Axis::kTensor),
               .first_squares = of_first,
               .other_squares = of_other};
    }
  }
  return found;
}

// Parts that a trainer has cut may have their losses on the first one alone.
std::optional<LossDifference> DifferenceOfLosses(std::span<const ExchangeRecord> records,
                                                 const VerdictRanks& ranks) {
  for (int n = 0; n < std::ssize(ranks.ranks); ++n) {
    const int first = ranks.ranks[ranks.mesh.with(n, Axis::kTensor, 0)], other = ranks.ranks[n];
    const double of_first = records[first].loss, of_other = records[other].loss;
    const bool both = records[first].adds_loss && records[other].adds_loss;
    if (!both || of_first == of_other || (std::isnan(of_first) && std::isnan(of_other))) continue;
    return LossDifference{.first = first,
                          .other = other,
                          .other_tensor = ranks.mesh.coordinate(n, Axis::kTensor),
                          .first_loss = of_first,
                          .other_loss = of_other};
  }
  return std::nullopt;
}

Verdict Conclude(std::span<const ExchangeRecord> records,
                 absl::FunctionRef<std::string(int rank)> error_name,
                 std::span<const int> backwards) {
  Verdict verdict;
  verdict.known = records.front().known;
  verdict.returned = true;
  for (size_t rank = 0; rank < records.size(); ++rank) {
    const ExchangeRecord& record = records[rank];
    verdict.squares += record.squares;
    if (record.loss_counts) verdict.loss += record.loss;
    verdict.known = std::min(verdict.known, record.known);
    verdict.returned &= record.returned;
    verdict.engine_failed |= record.engine_failed;
    verdict.broken |= record.broken;
    verdict.updates_started |= record.updates_started;
    if (record.rates_hash != records.front().rates_hash && verdict.other_rates < 0)
      verdict.other_rates = static_cast<int>(rank);
    if (record.scopes_hash != records.front().scopes_hash && verdict.other_scopes < 0)
      verdict.other_scopes = static_cast<int>(rank);
    if (record.non_finite_unit >= 0 &&
        (verdict.non_finite_rank < 0 ||
         IsEarlier(record.non_finite_unit, verdict.non_finite_unit, backwards))) {
      verdict.non_finite_rank = static_cast<int>(rank);
      verdict.non_finite_unit = record.non_finite_unit;
      verdict.non_finite_parameter = record.non_finite_parameter;
    }
    if (record.failed && verdict.error.ok())
      verdict.error = record.Error(error_name(static_cast<int>(rank)));
  }
  return verdict;
}

}  // namespace ebb
