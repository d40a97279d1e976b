import killpoints

killpoints.arm()
