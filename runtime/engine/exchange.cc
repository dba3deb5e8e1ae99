#include "ebb/runtime/engine/exchange.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "absl/strings/str_cat.h"

namespace ebb {

void ExchangeRecord::SetError(const absl::Status& status) {
  failed = 1;
  status_code = static_cast<int32_t>(status.code());
  const size_t bytes = std::min(sizeof(message), status.message().size());
  message_bytes = static_cast<int32_t>(bytes);
  std::memcpy(message, status.message().data(), bytes);
}

absl::Status ExchangeRecord::Error(int rank) const {
  return absl::Status(static_cast<absl::StatusCode>(status_code),
                      absl::StrCat("rank ", rank, ": ",
                                   absl::string_view(message, static_cast<size_t>(message_bytes))));
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

Verdict Conclude(std::span<const ExchangeRecord> records) {
  Verdict verdict;
  verdict.told = records.front().told;
  verdict.returned = true;
  for (size_t rank = 0; rank < records.size(); ++rank) {
    const ExchangeRecord& record = records[rank];
    verdict.squares += record.squares;
    verdict.loss += record.loss;
    verdict.loss_count += record.loss_count;
    verdict.told = std::min(verdict.told, record.told);
    verdict.returned &= record.returned;
    verdict.engine_failed |= record.engine_failed;
    verdict.updates_started |= record.updates_started;
    verdict.scopes_differ |= record.scopes_hash != records.front().scopes_hash;
    if (record.non_finite_unit >= 0 && verdict.non_finite_rank < 0) {
      verdict.non_finite_rank = static_cast<int>(rank);
      verdict.non_finite_unit = record.non_finite_unit;
    }
    if (record.failed != 0 && verdict.error.ok())
      verdict.error = record.Error(static_cast<int>(rank));
  }
  return verdict;
}

}  // namespace ebb
