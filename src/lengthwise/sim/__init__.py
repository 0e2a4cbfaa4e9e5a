"""The simulator: executes plans in virtual time, and checks their schedules for deadlocks."""
