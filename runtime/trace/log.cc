#include "ebb/runtime/trace/log.h"
