#include "ebb/runtime/trace/ledger.h"
