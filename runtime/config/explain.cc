#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "ebb/runtime/base/message.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/config/convert.h"
#include "ebb/runtime/config/key_rows.h"

namespace ebb::config {
namespace {

// `optimizer`: the type of the top-level one, which may have defaults of its own.
std::string DefaultOf(const TakenKey& taken, std::string_view optimizer) {
  if (taken.key == nullptr) return "";
  const Row& row = FindRow(taken.key->path);
  if (taken.shown.starts_with("optimizer.") && HasWord(row.own_default_for, optimizer))
    return std::string(row.own_default);
  return std::string(row.default_value.empty() ? "not given" : row.default_value);
}

}  // namespace

absl::StatusOr<std::string> Explain(std::string_view text, const ReadOptions& options) {
  EBB_ASSIGN_OR_RETURN(Document document, ParseDocument(text));
  std::vector<TakenKey> keys;
  EBB_ASSIGN_OR_RETURN(Config config, FromDocument(std::move(document), options, &keys));
  const std::string optimizer = ValueOf(FindRow("optimizer.type"), config).get<std::string>();
  size_t key_width = 3, default_width = 7;
  for (const TakenKey& taken : keys) {
    key_width = std::max(key_width, Shortened(taken.shown).size());
    default_width = std::max(default_width, DefaultOf(taken, optimizer).size());
  }
  // Values are short, except lists of paths, which make their line longer.
  const auto line = [&](const std::string& key, const std::string& value,
                        const std::string& default_value, const std::string& how) {
    return absl::StrFormat("%-*s  %-16s  %-*s  %s\n", static_cast<int>(key_width), key, value,
                           static_cast<int>(default_width), default_value, how);
  };
  std::string lines = line("key", "value", "default", "taken");
  for (const TakenKey& taken : keys) {
    lines += line(Shortened(taken.shown), taken.value, DefaultOf(taken, optimizer), taken.how);
  }
  const auto list = [&](std::string_view title, const std::vector<std::string>& sentences) {
    if (!sentences.empty()) lines += Join({"\n", title, "\n"});
    for (const std::string& sentence : sentences) lines += Join({"  ", sentence, "\n"});
  };
  list("Warnings:", config.warnings);
  list("Logged when training starts:", config.remarks);
  return lines;
}

}  // namespace ebb::config
