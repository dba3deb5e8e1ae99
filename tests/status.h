// Expectations of absl::Status and absl::StatusOr, of which failures print the status. (Abseil's own
// matchers came after the releases that this project supports.)
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <ostream>
#include <source_location>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/base/status_macros.h"

namespace ebb::testing {

// An error with all of some texts in its message, and, where given, with that code.
class ErrorMatcher {
 public:
  using is_gtest_matcher = void;

  ErrorMatcher(std::optional<absl::StatusCode> code, std::vector<std::string> texts)
      : code_(code), texts_(std::move(texts)) {}

  bool MatchAndExplain(const absl::Status& status, std::ostream*) const {
    if (status.ok() || (code_ && status.code() != *code_)) return false;
    const std::string message(status.message());
    for (const std::string& text : texts_)
      if (message.find(text) == std::string::npos) return false;
    return true;
  }
  template <class T>
  bool MatchAndExplain(const absl::StatusOr<T>& result, std::ostream* out) const {
    return MatchAndExplain(result.status(), out);
  }

  void DescribeTo(std::ostream* out) const {
    *out << (code_ ? absl::StatusCodeToString(*code_) : "an error");
    for (const std::string& text : texts_) *out << ", with \"" << text << "\"";
  }
  void DescribeNegationTo(std::ostream* out) const {
    *out << "not ";
    DescribeTo(out);
  }

 private:
  std::optional<absl::StatusCode> code_;
  std::vector<std::string> texts_;
};

template <class... Texts>
ErrorMatcher Says(const Texts&... texts) {
  return {std::nullopt, {std::string(texts)...}};
}

template <class... Texts>
ErrorMatcher StatusIs(absl::StatusCode code, const Texts&... texts) {
  return {code, {std::string(texts)...}};
}

inline const absl::Status& StatusOf(const absl::Status& status) {
  return status;
}
template <class T>
const absl::Status& StatusOf(const absl::StatusOr<T>& result) {
  return result.status();
}

// A function, because a lambda of many statements is no argument for a macro.
inline void ExpectOk(const absl::Status& status,
                     std::source_location at = std::source_location::current()) {
  if (!status.ok()) ADD_FAILURE_AT(at.file_name(), static_cast<int>(at.line())) << status;
}

}  // namespace ebb::testing

#define EXPECT_OK(expression) ::ebb::testing::ExpectOk(::ebb::testing::StatusOf(expression))

#define ASSERT_OK(expression)                                               \
  do {                                                                      \
    const ::absl::Status ebb_status = ::ebb::testing::StatusOf(expression); \
    if (!ebb_status.ok()) FAIL() << ebb_status;                             \
  } while (false)

// ASSERT_OK_AND_ASSIGN(const Plan plan, MakePlan());
#define ASSERT_OK_AND_ASSIGN(lhs, expression) \
  ASSERT_OK_AND_ASSIGN_INNER(EBB_STATUS_CONCAT(ebb_result_, __LINE__), lhs, expression)
#define ASSERT_OK_AND_ASSIGN_INNER(result, lhs, expression) \
  auto result = (expression);                               \
  ASSERT_OK(result);                                        \
  lhs = *std::move(result)
