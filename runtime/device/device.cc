#include "ebb/runtime/device/device.h"
