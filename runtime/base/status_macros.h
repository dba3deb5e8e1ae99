// The one way to return an error Status inside the library. No public header includes this file.
#pragma once

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#define EBB_STATUS_CONCAT_INNER(a, b) a##b
#define EBB_STATUS_CONCAT(a, b) EBB_STATUS_CONCAT_INNER(a, b)

#define EBB_RETURN_IF_ERROR_INNER(status, expression) \
  do {                                                \
    ::absl::Status status = (expression);             \
    if (!status.ok()) return status;                  \
  } while (false)

#define EBB_RETURN_IF_ERROR(expression) \
  EBB_RETURN_IF_ERROR_INNER(EBB_STATUS_CONCAT(ebb_status_, __LINE__), expression)

#define EBB_ASSIGN_OR_RETURN_INNER(result, lhs, expression) \
  auto result = (expression);                               \
  if (!result.ok()) return std::move(result).status();      \
  lhs = *std::move(result)

#define EBB_ASSIGN_OR_RETURN(lhs, expression) \
  EBB_ASSIGN_OR_RETURN_INNER(EBB_STATUS_CONCAT(ebb_result_, __LINE__), lhs, expression)
