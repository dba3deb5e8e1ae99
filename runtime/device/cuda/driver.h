// Functions of the CUDA driver. It is not linked, because programs must start on machines without
// it.
#pragma once

namespace ebb {

// Null: there is no driver, or it lacks this function of CUDA 12.0.
void* DriverFunction(const char* name);

}  // namespace ebb
