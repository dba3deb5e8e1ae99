#include "ebb/runtime/config/problems.h"

#include <algorithm>

#include "ebb/runtime/base/message.h"

namespace ebb::config {
namespace {

constexpr size_t kShownMax = 20, kKeptMax = 1000;

}  // namespace

void Problems::Add(std::string_view path, std::initializer_list<std::string_view> sentence) {
  const auto found = offsets_.find(path);
  if (problems_.size() < kKeptMax) wrong_.emplace_back(path);
  AddAt(found == offsets_.end() ? std::string::npos : found->second, path, Join(sentence));
}

void Problems::AddAt(size_t offset, std::string_view path, std::string sentence) {
  if (problems_.size() >= kKeptMax) {
    ++dropped_;
    return;
  }
  if (offset != std::string::npos) sentence = Join({Place(text_, offset), ": ", sentence});
  problems_.push_back({offset, std::string(path), std::move(sentence)});
}

// Whether the key is a parameter of a wrong type, because only known types have known parameters.
bool Problems::FollowsFromWrongType(const Problem& problem) const {
  constexpr std::string_view kParameters = ".params.";
  const size_t at = problem.path.find(kParameters);
  if (at == std::string::npos) return false;
  const std::string type = problem.path.substr(0, at) + ".type";
  return std::find(wrong_.begin(), wrong_.end(), type) != wrong_.end();
}

void Problems::AddTogether(std::string_view path,
                           std::initializer_list<std::string_view> sentence) {
  const std::string text = Join(sentence);
  for (const std::vector<std::string>* keys : {&wrong_, &meant_}) {
    for (const std::string& key : *keys) {
      // The key itself, or one within it.
      if (key == path || text.find(Join({"\"", key, "\""})) != std::string::npos ||
          text.find(Join({"\"", key, "."})) != std::string::npos) {
        return;
      }
    }
  }
  Add(path, {text});
}

absl::Status Problems::status() const {
  std::vector<Problem> sorted;
  for (const Problem& problem : problems_) {
    if (!FollowsFromWrongType(problem)) sorted.push_back(problem);
  }
  // A problem is left out only if the problem that causes it is there.
  if (sorted.empty()) sorted = problems_;
  if (sorted.empty()) return absl::OkStatus();
  if (sorted.size() == 1) return Invalid({sorted[0].sentence});
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](const Problem& a, const Problem& b) { return a.offset < b.offset; });
  const size_t count = sorted.size() + dropped_;
  std::string all = Join({std::to_string(count), " problems"});
  for (size_t i = 0; i < std::min(sorted.size(), kShownMax); ++i) {
    all += Join({"\n  ", sorted[i].sentence});
  }
  if (sorted.size() > kShownMax) {
    all += Join({"\n  and ", std::to_string(count - kShownMax), " more"});
  }
  return Invalid({all});
}

std::string Place(std::string_view text, size_t offset) {
  const std::string_view before = text.substr(0, std::min(offset, text.size()));
  const size_t line_start = before.rfind('\n') + 1;  // npos + 1 is 0
  return Join({"line ", std::to_string(1 + std::count(before.begin(), before.end(), '\n')),
               ", column ", std::to_string(1 + before.size() - line_start)});
}

}  // namespace ebb::config
