// Macros that return an error Status to the caller.
#pragma once

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#define GPT_CONCAT_INNER(a, b) a##b
#define GPT_CONCAT(a, b) GPT_CONCAT_INNER(a, b)

#define GPT_RETURN_IF_ERROR_INNER(status, expression) \
  do {                                                \
    ::absl::Status status = (expression);             \
    if (!status.ok()) return status;                  \
  } while (false)

#define GPT_RETURN_IF_ERROR(expression) \
  GPT_RETURN_IF_ERROR_INNER(GPT_CONCAT(gpt_status_, __LINE__), expression)

#define GPT_ASSIGN_OR_RETURN_INNER(result, lhs, expression) \
  auto result = (expression);                               \
  if (!result.ok()) return std::move(result).status();      \
  lhs = *std::move(result)

#define GPT_ASSIGN_OR_RETURN(lhs, expression) \
  GPT_ASSIGN_OR_RETURN_INNER(GPT_CONCAT(gpt_result_, __LINE__), lhs, expression)
