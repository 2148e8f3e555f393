"""Pure plans: schedules, partitions, itineraries and transfers, as data. Standard library only."""
