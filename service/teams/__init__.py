"""Teams: people who share datasets, jobs and reviews."""
