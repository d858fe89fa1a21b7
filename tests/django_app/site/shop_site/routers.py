class Apart:
    """Keeps Postroom's tables out of the database "other"."""

    def allow_migrate(self, db, app_label, **hints):
        return None if app_label != "postroom" else db == "default"
